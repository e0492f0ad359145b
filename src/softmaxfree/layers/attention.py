"""Softmax-free attention as a layer: a drop-in for self- and cross-attention."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attention import landmark_attention
from ..ops.checks import check_mask, check_tokens, shape
from ..ops.inverse import check_inverse
from ..ops.kernel import token_scale
from .samplers import SAMPLERS, Size


class SoftmaxFreeAttention(nn.Module):
    """Multi-head attention through bottleneck tokens, linear in the number of tokens.

    Queries and keys share one projection, Q = K, as the kernel is symmetric.

    Args:
        dim: Width of the tokens.
        num_heads: Heads; must divide `dim`.
        ndim: 2 for images, whose `size` the forward pass then needs; 1 for sequences.
        sampler: How bottleneck tokens are made: `conv`, `avg`, `random` or `biased`.
        ratio: Every `ratio` tokens of a sequence, every `ratio` x `ratio` of an image, become one
            bottleneck token.
        tokens: This many bottleneck tokens, whatever the size: cost stays linear. The
            convolution still has the ratio as its kernel, and its output is pooled to so many.
        normalize: SOFT++ if true, SOFT if not.
        inverse, iters, ridge: How the bottleneck matrix is inverted, see `softmaxfree.pinv`.
        landmark_norm: LayerNorm and GELU on the bottleneck tokens.
        value_conv: Size (odd) of a depthwise convolution of the values that is added to the
            result, one kernel a head; None for none. The released models have it.
        prefix_tokens: How many tokens come before the grid, such as a class token. Each is a
            bottleneck token of its own and takes no part in the value convolution.
        pad: `replicate` or `drop`, what becomes of sides that the ratio does not divide.
        qkv_bias: Biases in the projections of queries and values.
        causal: Refused: bottleneck tokens are made of the whole sequence, so that every output
            would see the future.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        ndim: int = 2,
        sampler: str = "conv",
        ratio: int = 8,
        tokens: int | None = None,
        normalize: bool = True,
        inverse: str = "auto",
        iters: int = 20,
        ridge: float | None = None,
        landmark_norm: bool = True,
        value_conv: int | None = None,
        prefix_tokens: int = 0,
        pad: str = "replicate",
        qkv_bias: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if causal:
            raise ValueError(
                "causal attention is not possible here: bottleneck tokens are made of the whole "
                "sequence and would leak the future into every output; use softmax attention"
            )
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide dim, got dim={dim}, num_heads={num_heads}")
        if sampler not in SAMPLERS:
            raise ValueError(f"unknown sampler {sampler!r}; choose one of {', '.join(SAMPLERS)}")
        if value_conv is not None and (value_conv < 1 or value_conv % 2 == 0):
            raise ValueError(f"value_conv must be an odd size or None, got {value_conv}")
        if prefix_tokens < 0:
            raise ValueError(f"prefix_tokens must be 0 or more, got {prefix_tokens}")
        check_inverse(inverse, iters, ridge)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.ndim, self.prefix_tokens, self.normalize = ndim, prefix_tokens, normalize
        self.inverse, self.iters, self.ridge = inverse, iters, ridge

        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.sampler = SAMPLERS[sampler](self.head_dim, ndim, ratio, tokens, pad)
        self.landmark_norm = (
            nn.Sequential(nn.LayerNorm(self.head_dim), nn.GELU())
            if landmark_norm
            else nn.Identity()
        )
        self.value_conv = None if value_conv is None else ValueConv(num_heads, value_conv, ndim)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        size: Size | None = None,
        context: Tensor | None = None,
        context_size: Size | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attends from x to x, or to the context.

        Args:
            x: (B, N, dim) tokens: `prefix_tokens` of them, then the grid's, row by row.
            size: (H, W) of the grid if the layer is for images, nothing or (N,) if it is for
                sequences.
            context: (B, L, dim) tokens that give keys and values; x itself if None. The
                bottleneck is then made of the samples of both.
            context_size: The context's grid.
            mask: (B, N), or (B, L) with a context: True for the keys to keep. What is dropped
                changes nothing, whatever it holds.

        Returns:
            (B, N, dim).
        """
        size = self._check(x, size, "x", "size")
        q = self._heads(self.q(x))
        if context is None:
            source, source_size, k = x, size, q
            if context_size is not None:
                raise ValueError("context_size is given without a context; pass both or neither")
        else:
            source_size = self._check(context, context_size, "context", "context_size")
            if context.shape[0] != x.shape[0]:
                raise ValueError(
                    f"context must have x's batch of {x.shape[0]}, got shape {shape(context)}"
                )
            if self.value_conv is not None:
                raise ValueError(
                    "the value convolution needs queries and values on one grid; "
                    "build the layer with value_conv=None for cross-attention"
                )
            source, k = context, self._heads(self.q(context))
        if mask is not None:
            check_mask("mask", mask, source.shape[:1], source.shape[1])
            mask = mask.expand(source.shape[:2])

        landmarks, landmark_mask = self._sample(q, size, mask if context is None else None)
        if context is not None:
            landmarks, landmark_mask = _join(
                (landmarks, landmark_mask), self._sample(k, source_size, mask)
            )
        landmarks = self.landmark_norm(landmarks * token_scale(self.head_dim))

        values = self.v(source)
        out = landmark_attention(
            q,
            k,
            self._heads(values),
            landmarks,
            1.0,
            self.normalize,
            self.inverse,
            self.iters,
            self.ridge,
            None if mask is None else mask.unsqueeze(1),
            None if landmark_mask is None else landmark_mask.unsqueeze(1),
        )
        out = out.transpose(1, 2).flatten(2)  # (B, heads, N, d) -> (B, N, dim)
        if self.value_conv is not None:
            if mask is not None:
                values = values.masked_fill(~mask.unsqueeze(-1), 0)
            local = self.value_conv(values[:, self.prefix_tokens :], size)
            out = out + F.pad(local, (0, 0, self.prefix_tokens, 0))
        return self.proj(out)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, dim) -> (B, heads, N, head_dim)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _sample(self, q: Tensor, size: Size, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Bottleneck tokens (B, heads, m, d) and their mask (B, m): the prefix, the samples."""
        k = self.prefix_tokens
        grid_mask = None if mask is None else mask[:, k:]
        landmarks, landmark_mask = self.sampler(q[..., k:, :], size, grid_mask)
        if k == 0:
            return landmarks, landmark_mask
        prefix_mask = None if mask is None else mask[:, :k]
        return _join((q[..., :k, :], prefix_mask), (landmarks, landmark_mask))

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

    def extra_repr(self) -> str:
        variant = "SOFT++" if self.normalize else "SOFT"
        return f"{variant}, dim={self.dim}, num_heads={self.num_heads}, inverse={self.inverse!r}"


class ValueConv(nn.Module):
    """A depthwise convolution of the values, one kernel for all channels of a head."""

    def __init__(self, num_heads: int, kernel_size: int, ndim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, 1, *[kernel_size] * ndim))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, v: Tensor, size: Size) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        num_heads, _, *kernel = self.weight.shape
        dim = v.shape[-1]
        weight = self.weight.repeat_interleave(dim // num_heads, 0)
        conv = F.conv1d if len(kernel) == 1 else F.conv2d
        image = v.transpose(1, 2).unflatten(2, size)
        out = conv(image, weight, padding=kernel[0] // 2, groups=dim)
        return out.flatten(2).transpose(1, 2)


Sample = tuple[Tensor, Tensor | None]
"""Bottleneck tokens (B, heads, m, d) and which of them to keep (B, m), None for all."""


def _join(first: Sample, second: Sample) -> Sample:
    (a, mask_a), (b, mask_b) = first, second
    landmarks = torch.cat([a, b], -2)
    if mask_a is None and mask_b is None:
        return landmarks, None
    masks = [
        torch.ones(a.shape[0], tokens.shape[-2], dtype=torch.bool, device=a.device)
        if mask is None
        else mask
        for tokens, mask in (first, second)
    ]
    return landmarks, torch.cat(masks, -1)
