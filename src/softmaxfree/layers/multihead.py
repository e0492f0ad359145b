"""What all multi-head attentions share: projections, checks, the value convolution."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..ops.backends import choose
from ..ops.batching import needs_gradient
from ..ops.checks import check_mask, check_tokens, finite_where_dropped, shape
from .samplers import Size


class Layout(NamedTuple):
    """Where queries and keys stand, and which of them count."""

    size: Size
    """The grid of the queries, after the prefix."""
    context_size: Size
    """The grid of the keys."""
    mask: Tensor | None
    """(B, L), True for the keys to keep; None for all."""
    query_mask: Tensor | None
    """(B, N), True for the queries to keep; None for all. In self-attention it is the keys' mask:
    what a dropped token holds must not change other queries' results."""


class MultiHeadAttention(nn.Module, ABC):
    """Projections to heads and back; what happens between them is a subclass's `attend`.

    Args:
        dim: Width of the tokens.
        num_heads: Heads; must divide `dim`.
        ndim: 2 for images, whose `size` the forward pass then needs; 1 for sequences.
        tie_qk: Queries and keys share one projection.
        value_conv: Size (odd) of a depthwise convolution of the values that is added to the
            result, one kernel a head; None for none.
        prefix_tokens: How many tokens come before the grid, such as a class token. They take no
            part in the value convolution.
        qkv_bias: Biases in the projections of queries, keys and values.
        value_conv_per_channel: A kernel for each channel of the value convolution, not each head.
        gate: Multiply the result by a sigmoid of a projection of the tokens, channel by channel.
    """

    linear: ClassVar[bool] = True
    """Whether cost grows linearly with the number of tokens."""
    cross_attention: ClassVar[bool] = True
    """Whether keys and values may come from a context."""
    equivariant: ClassVar[bool] = False
    """Whether permuting the tokens permutes the result in the same way."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        ndim: int = 2,
        tie_qk: bool = True,
        value_conv: int | None = None,
        prefix_tokens: int = 0,
        qkv_bias: bool = True,
        value_conv_per_channel: bool = False,
        gate: bool = False,
    ) -> None:
        super().__init__()
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise UserError(f"num_heads must divide dim, got dim={dim}, num_heads={num_heads}")
        if value_conv is not None and (value_conv < 1 or value_conv % 2 == 0):
            raise UserError(f"value_conv must be an odd size or None, got {value_conv}")
        if prefix_tokens < 0:
            raise UserError(f"prefix_tokens must be 0 or more, got {prefix_tokens}")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.ndim, self.tie_qk, self.prefix_tokens = ndim, tie_qk, prefix_tokens
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.k = None if tie_qk else nn.Linear(dim, dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        kernels = dim if value_conv_per_channel else num_heads
        self.value_conv = None if value_conv is None else ValueConv(kernels, value_conv, ndim)
        self.gate = nn.Linear(dim, dim) if gate else None
        self.proj = nn.Linear(dim, dim)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """The attention itself, a linear function of the values.

        Args:
            q: (B, heads, N, d) queries.
            k: (B, heads, L, d) keys; q itself for tied self-attention.
            v: (B, heads, L, d) values.
            layout: Grids and masks of queries and keys.

        Returns:
            (B, heads, N, d).
        """

    def reduce(
        self, source: Tensor, size: Size, mask: Tensor | None
    ) -> tuple[Tensor, Size, Tensor | None]:
        """The tokens (B, L, dim) that keys and values are made of, their grid and their mask."""
        return source, size, mask

    def forward(
        self,
        x: Tensor,
        size: Size | None = None,
        context: Tensor | None = None,
        context_size: Size | None = None,
        mask: Tensor | None = None,
        rotate: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attends from x to x, or to the context.

        Args:
            x: (B, N, dim) tokens: `prefix_tokens` of them, then the grid's, row by row.
            size: (H, W) of the grid if the layer is for images, nothing or (N,) if it is for
                sequences.
            context: (B, L, dim) tokens that give keys and values; x itself if None.
            context_size: The context's grid.
            mask: (B, N), or (B, L) with a context: True for the keys to keep. What a dropped
                key holds has no effect, even NaN.
            rotate: Applied to queries and keys (B, heads, N, d), as rotary positions are; for
                attention from x to x.

        Returns:
            (B, N, dim).
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise UserError(
                "TorchScript (torch.jit.trace) cannot record this attention, whose gradient is in "
                "closed form; use torch.export, torch.compile or `softmaxfree export`"
            )
        size = self._check(x, size, "x", "size")
        if context is None:
            source, source_size = x, size
            if context_size is not None:
                raise ValueError("context_size is given without a context; pass both or neither")
        else:
            if not self.cross_attention:
                raise ValueError(
                    f"{type(self).__name__} attends from tokens to themselves only; "
                    "leave the context out or choose another attention"
                )
            source, source_size = context, self._check_context(x, context, context_size)
        if mask is not None:
            check_mask("mask", mask, source.shape[:1], source.shape[1])
            mask = mask.expand(source.shape[:2])
            # Gradients of the projections multiply dropped tokens by 0, and 0 * NaN is NaN.
            source = finite_where_dropped(source, mask)
            x = source if context is None else x

        q = self._heads(self.q(x))
        reduced, reduced_size, reduced_mask = self.reduce(source, source_size, mask)
        if self.k is not None:
            k = self._heads(self.k(reduced))
        else:
            k = q if reduced is x else self._heads(self.q(reduced))
        if rotate is not None:
            q, k = (rotate(q),) * 2 if k is q else (rotate(q), rotate(k))
        values = self.v(reduced)
        query_mask = mask if context is None else None
        layout = Layout(size, reduced_size, reduced_mask, query_mask)
        out = self.attend(q, k, self._heads(values), layout)
        out = out.transpose(1, 2).flatten(2)  # (B, heads, N, d) -> (B, N, dim)
        if self.value_conv is not None:
            values = values if reduced is source else self.v(source)
            if mask is not None:
                values = values.masked_fill(~mask.unsqueeze(-1), 0)
            local = self.value_conv(values[:, self.prefix_tokens :], size)
            out = out + F.pad(local, (0, 0, self.prefix_tokens, 0))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj(out)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, dim) -> (B, heads, N, head_dim)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _check(self, x: Tensor, size: Size | None, name: str, size_name: str) -> Size:
        """Refuses tokens that do not fit the layer; returns their grid."""
        check_tokens(**{name: x})
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"{name} must be (B, N, {self.dim}), got shape {shape(x)}")
        n = x.shape[1] - self.prefix_tokens
        prefix = f" after {self.prefix_tokens} prefix tokens" if self.prefix_tokens else ""
        if n < 1:
            raise ValueError(f"{name} has no tokens{prefix}: its shape is {shape(x)}")
        if size is None and self.ndim == 1:
            return (n,)
        if size is None:
            raise ValueError(
                f"this layer is for images: pass {size_name}=(H, W) beside {name} of {n} tokens, "
                "or build it with ndim=1 for sequences"
            )
        size = tuple(size)
        if len(size) != self.ndim:
            expected = "(H, W)" if self.ndim == 2 else "(N,)"
            raise ValueError(f"{size_name} must be {expected} for ndim={self.ndim}, got {size}")
        if min(size) < 1 or math.prod(size) != n:
            raise ValueError(
                f"{size_name}={size} makes {math.prod(size)} tokens, "
                f"but {name} of shape {shape(x)} has {n}{prefix}"
            )
        return size

    def _check_context(self, x: Tensor, context: Tensor, context_size: Size | None) -> Size:
        size = self._check(context, context_size, "context", "context_size")
        if context.shape[0] != x.shape[0]:
            raise ValueError(
                f"context must have x's batch of {x.shape[0]}, got shape {shape(context)}"
            )
        if self.value_conv is not None:
            raise ValueError(
                "the value convolution needs queries and values on one grid; "
                "build the layer with value_conv=None for cross-attention"
            )
        return size

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}, tie_qk={self.tie_qk}"


def dropped_to_zero(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """(B, heads, L, d) with zeros for tokens that the mask (B, L) drops."""
    return tokens if mask is None else tokens.masked_fill(~mask[:, None, :, None], 0)


class ValueConv(nn.Module):
    """A depthwise convolution of the values; the channels of a head may share a kernel.

    Args:
        kernels: Number of kernels: one for each head, or one for each channel.
        kernel_size: Their side, odd.
        ndim: 2 for images, 1 for sequences.
    """

    def __init__(self, kernels: int, kernel_size: int, ndim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(kernels, 1, *[kernel_size] * ndim))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, v: Tensor, size: Size) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        if (
            len(size) == 2
            and needs_gradient(self.weight)
            and choose(v, self.weight).has_kernel_gradient
        ):
            return _Convolution.apply(v, self.weight, size)
        return _convolved(v, self.weight, size)


def _convolved(v: Tensor, weight: Tensor, size: Size) -> Tensor:
    wide = _of_all_channels(weight, v.shape[-1])
    conv = F.conv1d if len(size) == 1 else F.conv2d
    out = conv(_image(v, size), wide, padding=weight.shape[-1] // 2, groups=len(wide))
    return out.flatten(2).transpose(1, 2)


def _of_all_channels(weight: Tensor, dim: int) -> Tensor:
    """(kernels, 1, ...) -> (dim, 1, ...)."""
    kernels, _, *kernel = weight.shape
    return weight.expand(-1, dim // kernels, *kernel).reshape(dim, 1, *kernel)


def _image(tokens: Tensor, size: Size) -> Tensor:
    return tokens.transpose(1, 2).unflatten(2, size)


class _Convolution(torch.autograd.Function):
    """`_convolved` of images, with the weight's gradient by a faster backend.

    The gradient of v is the convolution of the output's gradient with the flipped kernels.
    """

    @staticmethod
    def forward(v: Tensor, weight: Tensor, size: Size) -> Tensor:
        return _convolved(v, weight, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, weight, ctx.size = inputs
        ctx.save_for_backward(v, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        v, weight = ctx.saved_tensors
        grad_weight = None
        if not torch.is_grad_enabled():
            images = v.unflatten(1, ctx.size), grad.unflatten(1, ctx.size)
            grad_weight = choose(v, grad).kernel_gradient(*images, weight)
        if grad_weight is None:
            pull_back = torch.func.vjp(lambda v, w: _convolved(v, w, ctx.size), v, weight)[1]
            return *pull_back(grad), None
        flipped = weight.flip(-2, -1)
        return _convolved(grad, flipped, ctx.size), grad_weight, None
