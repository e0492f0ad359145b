"""Recording what the attentions of a model do, without leaving a trace in it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import Lock

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..layers.multihead import Layout, MultiHeadAttention
from .attention_record import AttentionRecord


@contextmanager
def recorded_attention(model: nn.Module) -> Iterator[dict[str, AttentionRecord]]:
    """Records the attentions of every forward pass of the model inside of it.

        with recorded_attention(model) as layers:
            model(images)
        layers["stages.0.blocks.0.attention"].factors().P

    The model is afterwards what it was, also if an error is raised inside. Several threads may
    record one model at once: each sees the passes that it has started itself. A model is to be
    recorded as it is, not as `torch.compile` makes it.

    Args:
        model: With attentions of this package, its own or put in by `replace_attention`.

    Returns:
        Layers by name, in the order in which they ran; of each its last pass.
    """
    names = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
    }
    if not names:
        raise UserError(
            f"{type(model).__name__} has no attention of this package; put one in with "
            "softmaxfree.replace_attention"
        )
    recording = _Recording(names)
    with ExitStack() as stack:
        for attention in names:
            stack.enter_context(_tapped(attention))
        token = _recordings.set((*_recordings.get(), recording))
        try:
            yield recording.layers
        finally:
            _recordings.reset(token)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes are afterwards as they were before.

    Nothing is written to a model that is in evaluation mode, so that threads can share it.
    """
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class _Recording:
    """What one `recorded_attention` has seen."""

    def __init__(self, names: dict[MultiHeadAttention, str]) -> None:
        self.names = names
        self.layers: dict[str, AttentionRecord] = {}

    def add(self, tap: "_Tap", q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
        attention = tap.attention
        if attention not in self.names:
            return
        # Under autocast tokens are of another type than the weights.
        name, dtype = self.names[attention], next(attention.parameters()).dtype
        queries, values = q.detach().to(dtype), v.detach().to(dtype)
        keys = queries if k is q else k.detach().to(dtype)
        self.layers.pop(name, None)  # one that runs again comes last
        self.layers[name] = AttentionRecord(
            name, attention, tap.own, queries, keys, values, layout, attention.training
        )


_recordings: ContextVar[tuple[_Recording, ...]] = ContextVar("recordings", default=())
"""Those that are open in this thread."""


class _Tap:
    """Stands in for a layer's `attend` as long as anyone records the layer."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        self.attention, self.own, self.users = attention, attention.attend, 0
        self.before = vars(attention).get("attend")
        """What the layer itself, not its class, has under that name: as a rule nothing."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        out = self.own(q, k, v, layout)
        for recording in _recordings.get():
            recording.add(self, q, k, v, layout)
        return out


_lock = Lock()


@contextmanager
def _tapped(attention: MultiHeadAttention) -> Iterator[None]:
    """One tap serves all threads: the first to come puts it in, the last to go takes it out."""
    attributes = vars(attention)
    with _lock:
        tap = attributes.get("attend")
        if not isinstance(tap, _Tap):
            tap = attributes["attend"] = _Tap(attention)
        tap.users += 1
    try:
        yield
    finally:
        with _lock:
            tap.users -= 1
            if tap.users == 0:
                del attributes["attend"]
                if tap.before is not None:
                    attributes["attend"] = tap.before
