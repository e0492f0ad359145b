"""The feed-forward network, in tiles on a CPU."""

from collections.abc import Iterator
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..ops.backends import choose
from ..ops.batching import is_wrapped, keep_signature, needs_gradient
from ..ops.scratch import scratch
from .activations import gelu_form

_TILE_BYTES = 2**21
"""Size of one tile's hidden values, per thread."""

_TILE_TOKENS = 1024
"""Fewest tokens in a tile: with fewer, the weights' gradient takes more time to write than to
compute."""


class Mlp(timm.layers.Mlp):
    """timm's `Mlp`, faster on a CPU: it computes the hidden layer one tile of tokens at a time.

    The hidden layer of all tokens would be written to fresh memory, whose page faults cost as
    much as the activation. Training keeps the hidden layer before its activation only; the
    backward pass computes the activation again.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        form = gelu_form(self.act)
        if form is None or not self._is_plain(x):
            return super().forward(x)
        tensors = (x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        keep = needs_gradient(*tensors)
        tiled = _Tiled.apply if keep else _Tiled.forward
        return tiled(*tensors, self.act, form, keep)[0]

    def _is_plain(self, x: Tensor) -> bool:
        """Whether the layers are as they were built, and no hook reads their outputs."""
        layers = (self.fc1, self.act, self.drop1, self.norm, self.fc2, self.drop2)
        return (
            not torch.compiler.is_compiling()
            and type(x) in (Tensor, nn.Parameter)
            and x.device.type == "cpu"
            and not torch.is_autocast_enabled("cpu")
            and type(self.fc1) is type(self.fc2) is nn.Linear
            and type(self.norm) is nn.Identity
            and not (self.training and (self.drop1.p or self.drop2.p))
            and not any(is_watched(layer) for layer in layers)
            and all(
                parameter is not None
                and type(parameter) in (nn.Parameter, Tensor)
                and parameter.dtype == x.dtype
                and not is_wrapped(parameter)
                for parameter in (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
            )
            and x.dtype in (torch.float32, torch.float64)
            and not is_wrapped(x)
        )


def is_watched(layer: nn.Module) -> bool:
    """Whether a layer has to be called as a module: it has hooks, there are global hooks, or its
    `forward` has been replaced."""
    return bool(
        "forward" in vars(layer)
        or torch_module._has_any_global_hook()
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


class _Tiled(torch.autograd.Function):
    """Y = act(H) W2^T + b2 with H = x W1^T + b1; H too, if the backward pass needs it.

    With G the gradient of Y: dW2 = G^T act(H), db2 = G^T 1, dH = (G W2) * act'(H),
    dW1 = dH^T x, db1 = dH^T 1, dx = dH W1.
    """

    @staticmethod
    @keep_signature
    def forward(
        x: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        act: nn.Module,
        form: str,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), len(w2))
        hidden = rows.new_empty(len(rows), len(w1)) if keep else None
        for tile in _tiles(rows, w1):
            size = tile.stop - tile.start
            h = scratch("hidden", rows, size, len(w1)) if hidden is None else hidden[tile]
            torch.addmm(b1, rows[tile], w1.mT, out=h)
            torch.addmm(b2, choose(h).gelu(h, form), w2.mT, out=out[tile])
        return out.view(*x.shape[:-1], -1), hidden

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, ctx.act, ctx.form, _ = inputs
        _, hidden = output
        ctx.mark_non_differentiable(hidden)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        x, w1, b1, w2, b2, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable_gradient(grad, ctx.act, x, w1, b1, w2, b2), *[None] * 3
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_x = torch.empty_like(rows)
        learned = any(ctx.needs_input_grad[1:5])
        grad_w1, grad_w2, grad_b1 = torch.empty_like(w1), torch.empty_like(w2), torch.zeros_like(b1)
        for tile in _tiles(rows, w1):
            h = hidden[tile]
            grad_h = torch.mm(grad_rows[tile], w2, out=scratch("grad_hidden", h, *h.shape))
            grad_h = choose(h).gelu_backward(grad_h, h, ctx.form)
            torch.mm(grad_h, w1, out=grad_x[tile])
            if learned:
                so_far = int(tile.start > 0)  # 0 for the first tile: the memory is uninitialised
                grad_w2.addmm_(grad_rows[tile].mT, choose(h).gelu(h, ctx.form), beta=so_far)
                grad_w1.addmm_(grad_h.mT, rows[tile], beta=so_far)
                grad_b1.add_(grad_h.sum(0))
        grad_x = grad_x.view(x.shape)
        if not learned:
            return grad_x, *[None] * 7
        return grad_x, grad_w1, grad_b1, grad_w2, grad_rows.sum(0), *[None] * 3


def _tiles(rows: Tensor, w1: Tensor) -> Iterator[slice]:
    count = _TILE_BYTES * torch.get_num_threads() // (len(w1) * rows.element_size())
    step = max(count, _TILE_TOKENS)
    for start in range(0, len(rows), step):
        yield slice(start, min(start + step, len(rows)))


def _differentiable_gradient(grad: Tensor, act: nn.Module, *inputs: Tensor) -> tuple[Any, ...]:
    """The backward pass in a form that can be differentiated."""

    def plain(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(act(F.linear(x, w1, b1)), w2, b2)

    return torch.func.vjp(plain, *inputs)[1](grad)
