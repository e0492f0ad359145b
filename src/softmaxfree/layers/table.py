"""Every attention by its name, all called as `attention(x, size, mask=mask)`."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from .attention import SoftmaxFreeAttention
from .baselines import GaussianAttention, SoftmaxAttention
from .multihead import MultiHeadAttention

ATTENTIONS: dict[str, Callable[..., MultiHeadAttention]] = {
    "soft": partial(SoftmaxFreeAttention, normalize=False),
    "softpp": partial(SoftmaxFreeAttention, normalize=True),
    "softmax": partial(SoftmaxAttention, tie_qk=False),
    "gaussian": GaussianAttention,
}
"""Each takes a width, a number of heads, and the options that its signature names."""


def build_attention(name: str, dim: int, num_heads: int, **options: Any) -> MultiHeadAttention:
    """The attention of that name; options that it does not have are left out."""
    known = _options(name)
    options = {option: value for option, value in options.items() if option in known}
    return ATTENTIONS[name](dim, num_heads, **options)


def chosen_options(name: str, **options: Any) -> dict[str, Any]:
    """The options that are not None; refuses a name or an option that is not there."""
    if name not in ATTENTIONS:
        raise ValueError(f"unknown attention {name!r}; choose one of {', '.join(ATTENTIONS)}")
    chosen = {option: value for option, value in options.items() if value is not None}
    for option in chosen:
        if option not in _options(name):
            having = [other for other in ATTENTIONS if option in _options(other)]
            raise ValueError(
                f"attention {name!r} has no {option}; leave it out, "
                f"or choose one of {', '.join(having)}"
            )
    return chosen


def _options(name: str) -> set[str]:
    return set(inspect.signature(ATTENTIONS[name]).parameters)
