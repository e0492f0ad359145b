"""Recording queries, keys and values of the attentions of a model."""

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
    """Records the attentions of a model during the forward passes inside the block.

        with recorded_attention(model) as layers:
            model(images)
        layers["stages.0.blocks.0.attention"].factors().P

    Afterwards the model is as before, also after an error. Several threads may record one model at
    once: each sees its own passes. Compiled models cannot be recorded: pass the model itself.

    Args:
        model: With attentions of this package, its own or put in by `replace_attention`.

    Returns:
        The last pass of every layer, by name, in the order in which layers ran.
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
    """Puts a model in evaluation mode without gradients, and restores its modes afterwards.

    A model that is in evaluation mode already is not written to, so that threads can share it.
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
    """The layers that one `recorded_attention` has seen."""

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
"""Recordings that are open in this thread."""


class _Tap:
    """Replaces a layer's `attend` as long as anyone records the layer."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        self.attention, self.own, self.users = attention, attention.attend, 0
        self.before = vars(attention).get("attend")
        """An `attend` of the layer itself, not of its class; usually there is none."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        out = self.own(q, k, v, layout)
        for recording in _recordings.get():
            recording.add(self, q, k, v, layout)
        return out


_lock = Lock()


@contextmanager
def _tapped(attention: MultiHeadAttention) -> Iterator[None]:
    """Shares one tap among threads: the first puts it in, the last takes it out."""
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
