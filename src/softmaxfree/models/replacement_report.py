"""What replacing the attention of a model has changed: weights, multiply-adds, memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import torch
from torch import nn

from .cost import cost, image_bytes


@dataclass(frozen=True)
class Measured:
    """Size and cost of a model at its own input size."""

    parameters: int
    multiply_adds: float | None
    """For one image; None if not measured."""
    memory: int | None
    """Bytes kept for the backward pass of one image; None if not measured."""


@dataclass(frozen=True)
class Replacement:
    """The changes that `replace_attention` made; prints as a small table."""

    name: str
    """Name of the attention that the model has now."""
    layers: int
    """Number of layers that were replaced."""
    before: Measured
    after: Measured
    kept: tuple[str, ...]
    """Weights that the new layers took over."""
    new: tuple[str, ...]
    """Weights that have to be trained."""
    dropped: tuple[str, ...]
    """Weights and abilities of the attention before that this one does not have."""
    left: tuple[str, ...] = ()
    """Attentions that cannot be replaced and stay as they were."""

    def __str__(self) -> str:
        lines = [f"attention {self.name!r} in {self.layers} layer{'s' * (self.layers != 1)}"]
        lines.append(f"{'':22}{'before':>12}{'after':>12}{'change':>10}")
        for title, before, after, unit in (
            ("parameters", self.before.parameters, self.after.parameters, ""),
            ("multiply-adds", self.before.multiply_adds, self.after.multiply_adds, ""),
            ("memory of an image", self.before.memory, self.after.memory, "B"),
        ):
            if before is not None and after is not None:
                change = f"{after / before - 1:+.1%}" if before else ""
                cells = f"{_short(before, unit):>12}{_short(after, unit):>12}{change:>10}"
                lines.append(f"{title:22}{cells}".rstrip())
        for title in ("kept", "new", "dropped", "left"):
            if names := getattr(self, title):
                lines += wrap(f"{title + ':':9}{', '.join(names)}", 80, subsequent_indent=" " * 9)
        return "\n".join(lines)


def _short(number: float, unit: str) -> str:
    """1234567 -> 1.23 M."""
    for prefix in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} T{unit}"


def measure_model(model: nn.Module, core: Any, wanted: bool) -> Measured:
    """Counts parameters and, if wanted, measures multiply-adds and memory at the model's size.

    Models of sequences have no such size: only their parameters are counted.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not wanted or not hasattr(core, "patch_embed"):
        return Measured(parameters, None, None)
    embed = core.patch_embed
    channels = next(part.in_channels for part in embed.modules() if isinstance(part, nn.Conv2d))
    shape = (channels, *embed.img_size)
    with _unchanged(model), torch.enable_grad():
        return Measured(parameters, cost(model, *shape).multiply_adds, image_bytes(model, *shape))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores buffers, modes and the random state of the model afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, content in buffers:
                setattr(module, name, buffer)
                with torch.no_grad():
                    buffer.copy_(content)
