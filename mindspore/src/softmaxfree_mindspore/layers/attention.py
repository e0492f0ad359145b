"""Attention as layers: softmax-free, and the exact ones that the last stage may have."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import HeUniform, Normal, initializer

from ..ops.attention import LandmarkAttention, check_middle, gaussian_attention
from ..ops.inverse import check_inverse
from ..ops.kernel import token_scale
from ..ops.products import product, product_t
from .samplers import SAMPLERS, Size

NUM_LANDMARKS = 49
"""The paper's number, at every size."""
LANDMARKS_OF = ("queries", "keys", "both")
WINDOW = 2
"""Side of the windows that are convolved, where only the number of landmarks is given."""


class MultiHeadAttention(nn.Cell):
    """Projections to heads and back; what happens between them is a subclass's `attend`.

    Args:
        dim: Width of the tokens.
        num_heads: Heads; must divide `dim`.
        tie_qk: Queries and keys share one projection.
        value_conv: Size (odd) of a depthwise convolution of the values that is added to the
            result, one kernel a head; None for none.
        prefix_tokens: How many tokens come before the grid, such as a class token. They take no
            part in the value convolution.
        qkv_bias: Biases in the projections of queries, keys and values.
        value_conv_per_channel: A kernel for each channel of the value convolution, not each head.
        gate: Multiply the result by a sigmoid of a projection of the tokens, channel by channel.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        tie_qk: bool = True,
        value_conv: int | None = None,
        prefix_tokens: int = 0,
        qkv_bias: bool = True,
        value_conv_per_channel: bool = False,
        gate: bool = False,
    ) -> None:
        super().__init__()
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide dim, got dim={dim}, num_heads={num_heads}")
        if value_conv is not None and (value_conv < 1 or value_conv % 2 == 0):
            raise ValueError(f"value_conv must be an odd size or None, got {value_conv}")
        if prefix_tokens < 0:
            raise ValueError(f"prefix_tokens must be 0 or more, got {prefix_tokens}")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.prefix_tokens = prefix_tokens
        self.q = dense(dim, dim, qkv_bias)
        self.k = None if tie_qk else dense(dim, dim, qkv_bias)
        self.v = dense(dim, dim, qkv_bias)
        kernels = dim if value_conv_per_channel else num_heads
        self.value_conv = None if value_conv is None else ValueConv(kernels, value_conv)
        self.gate = dense(dim, dim) if gate else None
        self.proj = dense(dim, dim)

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor, size: Size) -> Tensor:
        """Queries, keys (None if they are the queries) and values (B, heads, N, d) -> the same."""
        raise NotImplementedError

    def construct(self, x: Tensor, size: Size) -> Tensor:
        """Attends from x to x.

        Args:
            x: (B, N, dim) tokens: `prefix_tokens` of them, then the grid's, row by row.
            size: (H, W) of the grid.

        Returns:
            (B, N, dim).
        """
        if x.shape[-1] != self.dim or x.shape[1] != self.prefix_tokens + size[0] * size[1]:
            raise ValueError(
                f"x must be (B, {self.prefix_tokens} + H W, {self.dim}), "
                f"got shape {x.shape} for size {size}"
            )
        q = self._heads(self.q(x))
        k = None if self.k is None else self._heads(self.k(x))
        values = self.v(x)
        out = self.attend(q, k, self._heads(values), size)
        out = out.swapaxes(1, 2).reshape(x.shape)  # (B, heads, N, d) -> (B, N, dim)
        if self.value_conv is not None:
            local = self.value_conv(values[:, self.prefix_tokens :], size)
            if self.prefix_tokens > 0:
                local = ops.cat((ops.zeros_like(values[:, : self.prefix_tokens]), local), 1)
            out = out + local
        if self.gate is not None:
            out = out * ops.sigmoid(self.gate(x))
        return self.proj(out)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, dim) -> (B, heads, N, d)."""
        b, n, _ = x.shape
        return x.reshape(b, n, self.num_heads, self.head_dim).swapaxes(1, 2)


class SoftmaxFreeAttention(MultiHeadAttention):
    """Multi-head attention through landmarks, linear in the number of tokens.

    Called as `attention(x, size)`. SOFT and SOFT++ are the paper's; softx, which divides rows by
    their sums and needs no inverse, is `middle="sums"`, see `softmax_free_attention`.

    Args:
        dim: Width of the tokens.
        num_heads: Heads; must divide `dim`.
        sampler: How landmarks are made: `conv`, `avg`, `random` or `biased`.
        num_landmarks: Landmarks, a square number: 49 by default. Their number does not grow with
            that of the tokens, so that cost is linear.
        ratio: In place of `num_landmarks`: every `ratio` x `ratio` tokens become one landmark. With
            both, the sampler `conv` has windows of this side and averages what they give to
            `num_landmarks`.
        normalize: SOFT++ if true, SOFT if not.
        inverse, iters, ridge: How the landmark matrix is inverted, see `pinv`.
        middle: What Z is: `inverse`, as in the paper, or `sums`, which needs no inverse.
        rows: Divide rows by their sums; always so with `middle="sums"`.
        key_weights: Learn a vector u for each head, and weight the keys by exp(u . k); needs rows
            that are divided by their sums.
        landmarks_of: What landmarks are samples of, where keys have a projection of their own:
            `queries`, `keys` or `both`. By default of both, and of queries with `middle="sums"`.
        landmark_norm: LayerNorm and GELU on the landmarks.
        pad: `replicate` or `drop`, what becomes of sides that the ratio does not divide.
        others: Of `MultiHeadAttention`. Each prefix token is a landmark of its own.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        sampler: str = "conv",
        num_landmarks: int | None = None,
        ratio: int | None = None,
        normalize: bool = True,
        inverse: str = "auto",
        iters: int = 20,
        ridge: float | None = None,
        middle: str = "inverse",
        rows: bool = False,
        key_weights: bool = False,
        landmarks_of: str | None = None,
        landmark_norm: bool = True,
        pad: str = "replicate",
        **others: Any,
    ) -> None:
        super().__init__(dim, num_heads, **others)
        if sampler not in SAMPLERS:
            raise ValueError(f"unknown sampler {sampler!r}; choose one of {', '.join(SAMPLERS)}")
        check_inverse(inverse, iters, ridge)
        check_middle(middle)
        if key_weights and not rows and middle != "sums":
            raise ValueError("key_weights need rows that are divided by their sums: add rows=True")
        if landmarks_of not in (None, *LANDMARKS_OF):
            raise ValueError(
                f"landmarks_of must be one of {', '.join(LANDMARKS_OF)}, got {landmarks_of!r}"
            )
        self.landmarks_of = landmarks_of or ("queries" if middle == "sums" else "both")
        self.key_weights = (
            Parameter(initializer("zeros", (num_heads, self.head_dim))) if key_weights else None
        )
        self.scale = token_scale(self.head_dim)
        if ratio is None:
            ratio = WINDOW
            num_landmarks = NUM_LANDMARKS if num_landmarks is None else num_landmarks
        self.sampler = SAMPLERS[sampler](self.head_dim, ratio, num_landmarks, pad)
        self.landmark_norm = (
            nn.SequentialCell(layer_norm(self.head_dim), nn.GELU(approximate=False))
            if landmark_norm
            else nn.Identity()
        )
        self.landmark_attention = LandmarkAttention(normalize, inverse, iters, ridge, middle, rows)

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor, size: Size) -> Tensor:
        log_weights = None
        if self.key_weights is not None:
            keys = q if k is None else k
            log_weights = (keys * ops.expand_dims(self.key_weights, 1)).sum(-1)
        q = q * self.scale
        k = None if k is None else k * self.scale
        landmarks = self.landmark_norm(self.landmarks(q, k, size))
        return self.landmark_attention(q, k, v, landmarks, log_weights)

    def landmarks(self, q: Tensor, k: Tensor | None, size: Size) -> Tensor:
        """(B, heads, m, d), of scaled queries, of keys, or of both."""
        if k is None or self.landmarks_of == "queries":
            return self.sample(q, size)
        if self.landmarks_of == "keys":
            return self.sample(k, size)
        return ops.cat((self.sample(q, size), self.sample(k, size)), 2)

    def sample(self, q: Tensor, size: Size) -> Tensor:
        """Landmarks (B, heads, m, d): the prefix, then the samples of the grid."""
        if self.prefix_tokens == 0:
            return self.sampler(q, size)
        prefix = q[:, :, : self.prefix_tokens]
        return ops.cat((prefix, self.sampler(q[:, :, self.prefix_tokens :], size)), 2)


class SoftmaxAttention(MultiHeadAttention):
    """Softmax attention, quadratic in the number of tokens."""

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor, size: Size) -> Tensor:
        keys = q if k is None else k
        similarity = product_t(q * self.head_dim**-0.5, keys)
        return product(ops.softmax(similarity, -1), v)


class GaussianAttention(MultiHeadAttention):
    """Gaussian attention without landmarks, normalised as in SOFT++; quadratic."""

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor, size: Size) -> Tensor:
        return gaussian_attention(q, q if k is None else k, v, True)


class ValueConv(nn.Cell):
    """A depthwise convolution of the values; the channels of a head may share a kernel."""

    def __init__(self, kernels: int, kernel_size: int) -> None:
        super().__init__()
        start = HeUniform(negative_slope=math.sqrt(5))
        self.weight = Parameter(initializer(start, (kernels, 1, kernel_size, kernel_size)))

    def construct(self, v: Tensor, size: Size) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        b, n, dim = v.shape
        kernels, _, side, _ = self.weight.shape
        weight = self.weight.astype(v.dtype).broadcast_to((kernels, dim // kernels, side, side))
        image = v.swapaxes(1, 2).reshape(b, dim, size[0], size[1])
        out = ops.conv2d(
            image,
            weight.reshape(dim, 1, side, side),
            pad_mode="pad",
            padding=side // 2,
            groups=dim,
        )
        return out.reshape(b, dim, n).swapaxes(1, 2)


def dense(before: int, after: int, bias: bool = True) -> nn.Dense:
    """A linear layer as all here start."""
    return nn.Dense(before, after, weight_init=Normal(0.02), bias_init="zeros", has_bias=bias)


def layer_norm(dim: int, eps: float = 1e-5) -> nn.LayerNorm:
    return nn.LayerNorm((dim,), epsilon=eps)


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
    "gaussian": GaussianAttention,
}
"""Each takes a width, a number of heads, and options."""
