"""The table of attentions: each by its name, all called as `attention(x, size, mask=mask)`."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..errors import UserError
from .agent import AgentAttention
from .attention import SoftmaxFreeAttention
from .gaussian import GaussianAttention
from .linformer import LinformerAttention
from .multihead import MultiHeadAttention
from .nystromformer import NystromformerAttention
from .performer import PerformerAttention
from .reformer import ReformerAttention
from .skyformer import SkyformerAttention
from .softmax import SoftmaxAttention
from .spatial_reduction import SpatialReductionAttention

ATTENTIONS: dict[str, Callable[..., MultiHeadAttention]] = {
    "soft": partial(SoftmaxFreeAttention, normalize=False),
    "softpp": partial(SoftmaxFreeAttention, normalize=True),
    "softx": partial(
        SoftmaxFreeAttention,
        normalize=False,
        middle="sums",
        rows=True,
        key_weights=True,
        sampler="avg",
        landmark_norm=False,
        tie_qk=False,
    ),
    "softmax": partial(SoftmaxAttention, tie_qk=False),
    "linformer": LinformerAttention,
    "spatial_reduction": SpatialReductionAttention,
    "performer": PerformerAttention,
    "nystromformer": NystromformerAttention,
    "agent": AgentAttention,
    "reformer": ReformerAttention,
    "skyformer": SkyformerAttention,
    "gaussian": GaussianAttention,
}
"""Each takes a width, a number of heads, and options, see `attention_options`."""

_BUILT_IN = frozenset(ATTENTIONS)

Attention = TypeVar("Attention", bound=type[MultiHeadAttention])


def register_attention(name: str, **defaults: Any) -> Callable[[Attention], Attention]:
    """Gives an attention class a name, which backbones, benchmarks and commands then take.

        @register_attention("mine")
        class MyAttention(MultiHeadAttention):
            def attend(self, q, k, v, layout):
                ...

    `softmaxfree.testing.AttentionBattery` tests what all attentions must keep. A class that is
    defined again, as in a cell of a notebook, replaces its earlier definition.

    Args:
        name: As in `attention=name`.
        defaults: Options of the class that go with the name.
    """
    if not name.isidentifier():
        raise UserError(f"an attention's name must be a word of letters and _, got {name!r}")

    def register(attention: Attention) -> Attention:
        if not (inspect.isclass(attention) and issubclass(attention, MultiHeadAttention)):
            raise UserError(
                f"an attention must be a subclass of MultiHeadAttention, got {attention!r}"
            )
        if name in _BUILT_IN or (
            name in ATTENTIONS and not _same(attention_class(name), attention)
        ):
            raise UserError(f"there is an attention {name!r} already; choose another name")
        ATTENTIONS[name] = partial(attention, **defaults) if defaults else attention
        return attention

    return register


def _same(one: type, other: type) -> bool:
    """Whether two classes come from one definition."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def build_attention(name: str, dim: int, num_heads: int, **options: Any) -> MultiHeadAttention:
    """Builds the attention of that name; options that it does not have are ignored."""
    known = attention_options(name)
    options = {option: value for option, value in options.items() if option in known}
    return ATTENTIONS[name](dim, num_heads, **options)


def chosen_options(name: str, **options: Any) -> dict[str, Any]:
    """Returns the options that are not None; refuses an unknown attention or option."""
    known = attention_options(name)
    chosen = {option: value for option, value in options.items() if value is not None}
    for option in chosen:
        if option not in known:
            having = [other for other in ATTENTIONS if option in attention_options(other)]
            raise UserError(
                f"attention {name!r} has no {option}; leave it out"
                + (f", or choose one of {', '.join(having)}" if having else "")
            )
    return chosen


def attention_class(name: str) -> type[MultiHeadAttention]:
    """Returns the class that a name stands for; refuses an unknown name."""
    if name not in ATTENTIONS:
        raise UserError(f"unknown attention {name!r}; choose one of {', '.join(ATTENTIONS)}")
    entry = ATTENTIONS[name]
    found = entry.func if isinstance(entry, partial) else entry
    assert isinstance(found, type)
    return found


def attention_options(name: str) -> set[str]:
    """Lists the arguments that an attention takes, those of its base classes included."""
    found: set[str] = set()
    for base in attention_class(name).__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        found |= {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found - {"self", "dim", "num_heads"}
