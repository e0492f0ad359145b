"""The activations of the feed-forward networks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import native
from ..ops.batching import keep_signature, needs_apply

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = _LINEAR * 0.044715


class TanhGELU(nn.Module):
    """GELU in its tanh form, x (1 + tanh(u)) / 2, which the released models have.

    As x sigmoid(2u), the same function, it takes less than half the time of torch's kernel on a
    CPU.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        here = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        if not here or torch.compiler.is_compiling():
            return F.gelu(x, approximate="tanh")
        return (_TanhGELU.apply if needs_apply(x) else _TanhGELU.forward)(x)


class _TanhGELU(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @keep_signature
    def forward(x: Tensor) -> Tensor:
        return _gate(x).mul_(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.func.vjp(lambda x: F.gelu(x, approximate="tanh"), x)[1](grad)[0]
        return _tanh_gelu_backward(grad, x)


def _gate(x: Tensor) -> Tensor:
    """sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return x.square().mul_(_CUBIC).add_(_LINEAR).mul_(x).sigmoid_()


def _tanh_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, of that of the result: gate + x gate (1 - gate) (2u)'."""
    gate = _gate(x)
    slope = x.square().mul_(3 * _CUBIC).add_(_LINEAR).mul_(x)
    slope.mul_(torch.sub(1, gate)).add_(1)
    return slope.mul_(gate).mul_(grad)


Forward = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor, Tensor], Tensor]
"""Of the result's gradient, which may be written over, and the input: the input's gradient."""


class InTiles(NamedTuple):
    """An activation for tiles, which are contiguous, and need no graph."""

    forward: Forward
    backward: Backward


def _in_tiles(tanh: bool, forward: Forward, backward: Backward) -> InTiles:
    """GELU in one of its forms: by compiled code, or else by these functions."""

    def either_forward(x: Tensor) -> Tensor:
        return native.gelu(x, tanh) if native.takes(x) else forward(x)

    def either_backward(grad: Tensor, x: Tensor) -> Tensor:
        return native.gelu_backward(grad, x, tanh) if native.takes(x) else backward(grad, x)

    return InTiles(either_forward, either_backward)


_GELU_IN_TILES = _in_tiles(False, F.gelu, torch.ops.aten.gelu_backward)
_TANH_GELU_IN_TILES = _in_tiles(True, _TanhGELU.forward, _tanh_gelu_backward)


def in_tiles(act: nn.Module) -> InTiles | None:
    """How an activation is computed in tiles; None for one that is not known."""
    if type(act) is TanhGELU or (type(act) is nn.GELU and act.approximate == "tanh"):
        return _TANH_GELU_IN_TILES
    return _GELU_IN_TILES if type(act) is nn.GELU else None


ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "gelu_tanh": TanhGELU}
"""Every activation by its name."""
