"""Softmax-free attention as a layer: a drop-in for self- and cross-attention."""

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..ops.attention import check_middle, landmark_attention
from ..ops.inverse import Inverse
from ..ops.kernel import token_scale
from .multihead import Layout, MultiHeadAttention
from .samplers import SAMPLERS, Sample, Size, join, sample_grid

NUM_LANDMARKS = 49
"""The paper's number, at every size."""
LANDMARKS_OF = ("queries", "keys", "both")
WINDOW = 2
"""Side of the windows that are convolved, where only the number of landmarks is given: small, so
that a small grid has as many windows as landmarks."""


class SoftmaxFreeAttention(MultiHeadAttention):
    """Multi-head attention through landmarks.

    Its cost is linear in the number of tokens with the default of 49 landmarks, or any fixed
    number; with `ratio` alone landmarks grow with the tokens, and cost faster than these.

    With scaled queries Q, keys K, landmarks L, and the Gaussian kernel k, every head computes

        SOFT      k(Q, L) A^+ k(L, K) V                    A = k(L, L)
        SOFT++    k(Q, L) D^-1/2 A^+ D^-1/2 k(L, K) V      D = diag(A 1)

    Beyond the paper, rows can be divided by their sums, keys can have learned weights, and Z, which
    is A^+ above, can be one over sums: with S = k(Q, L) Z k(L, K) and w_j = exp(u . k_j),

        softx     (S diag(w) V) / (S w)                    Z = diag(k(L, K) w)^-1

    Called as `attention(x, size)`, see `forward`.

    In half precision the kernel, the inverse and sums over tokens are float32. A layer that is
    float16 itself holds gradients up to 65,504 only: see the page on promises.

    Args:
        dim: Width of the tokens.
        num_heads: Heads; must divide `dim`.
        ndim: 2 for images, whose `size` the forward pass then needs; 1 for sequences.
        sampler: How landmarks are made: `conv`, `avg`, `random` or `biased`.
        num_landmarks: Landmarks, a square number for images: 49 by default, at every size.
        ratio: In place of `num_landmarks`: every `ratio` tokens of a sequence, every `ratio` x
            `ratio` of an image, become one landmark. With both, the sampler `conv` has windows of
            this side and averages what they give to `num_landmarks`.
        normalize: SOFT++ if true, SOFT if not.
        inverse, iters, ridge: How the landmark matrix is inverted, see `softmaxfree.pinv`.
        middle: What Z is: `inverse`, A^+ as in the paper, or `sums`, which needs no inverse.
        rows: Divide rows by their sums; always so with `middle="sums"`.
        key_weights: Learn a vector u for each head, and weight the keys by exp(u . k); needs rows
            that are divided by their sums.
        landmarks_of: What landmarks are samples of, where keys are not the queries: `queries`,
            `keys` or `both`. By default of both, and of queries with `middle="sums"`.
        landmark_norm: LayerNorm and GELU on the landmarks.
        value_conv: Size (odd) of a depthwise convolution of the values that is added to the
            result, one kernel a head; None for none. The released models have it.
        tie_qk: Queries and keys share one projection, as the kernel is symmetric.
        prefix_tokens: How many tokens come before the grid, such as a class token. Each is a
            landmark of its own and takes no part in the value convolution.
        pad: `replicate` or `drop`, what becomes of sides that the ratio does not divide.
        qkv_bias: Biases in the projections of queries and values.
        value_conv_per_channel, gate: Those of `MultiHeadAttention`; the paper has neither.
        causal: Refused: landmarks are made of the whole sequence, so that every output
            would see the future.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        ndim: int = 2,
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
        value_conv: int | None = None,
        tie_qk: bool = True,
        prefix_tokens: int = 0,
        pad: str = "replicate",
        qkv_bias: bool = True,
        value_conv_per_channel: bool = False,
        gate: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            ndim=ndim,
            tie_qk=tie_qk,
            value_conv=value_conv,
            prefix_tokens=prefix_tokens,
            qkv_bias=qkv_bias,
            value_conv_per_channel=value_conv_per_channel,
            gate=gate,
        )
        if causal:
            raise UserError(
                "causal attention is not possible here: landmarks are made of the whole "
                "sequence and would leak the future into every output; use softmax attention"
            )
        if sampler not in SAMPLERS:
            raise UserError(f"unknown sampler {sampler!r}; choose one of {', '.join(SAMPLERS)}")
        check_middle(middle, Inverse.checked(inverse, iters, ridge))
        divided = rows or middle == "sums"
        if key_weights and not divided:
            raise UserError("key_weights need rows that are divided by their sums: add rows=True")
        if landmarks_of not in (None, *LANDMARKS_OF):
            raise UserError(
                f"landmarks_of must be one of {', '.join(LANDMARKS_OF)}, got {landmarks_of!r}"
            )
        self.middle, self.rows = middle, divided
        self.landmarks_of = landmarks_of or ("queries" if middle == "sums" else "both")
        self.key_weights = (
            nn.Parameter(torch.zeros(num_heads, self.head_dim)) if key_weights else None
        )
        self.normalize, self.inverse, self.iters, self.ridge = normalize, inverse, iters, ridge
        if ratio is None:
            ratio = WINDOW
            num_landmarks = NUM_LANDMARKS if num_landmarks is None else num_landmarks
        self.sampler = SAMPLERS[sampler](self.head_dim, ndim, ratio, num_landmarks, pad)
        self.landmark_norm = (
            nn.Sequential(nn.LayerNorm(self.head_dim), nn.GELU())
            if landmark_norm
            else nn.Identity()
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        landmarks, landmark_mask = self.landmarks(q, k, layout)
        return landmark_attention(
            q,
            k,
            v,
            landmarks,
            self.inversion,
            normalize=self.normalize,
            landmark_scale=1.0,
            mask=None if layout.mask is None else layout.mask.unsqueeze(1),
            landmark_mask=None if landmark_mask is None else landmark_mask.unsqueeze(1),
            middle=self.middle,
            rows=self.rows,
            log_weights=self.log_weights(k),
        )

    @property
    def inversion(self) -> Inverse:
        """How the landmark matrix is inverted."""
        return Inverse.checked(self.inverse, self.iters, self.ridge)

    def log_weights(self, k: Tensor) -> Tensor | None:
        """u . k of keys (B, heads, L, d), the logarithms of their weights; None without weights."""
        u = self.key_weights
        return None if u is None else (k @ u.unsqueeze(-1)).squeeze(-1)

    def landmarks(self, q: Tensor, k: Tensor, layout: Layout) -> Sample:
        """Landmarks on the scale of tokens times d^(-1/4)."""
        samples = []
        if k is q or self.landmarks_of != "keys":
            samples.append(self.sample(q, layout.size, layout.query_mask))
        if k is not q and self.landmarks_of != "queries":
            samples.append(self.sample(k, layout.context_size, layout.mask))
        landmarks, landmark_mask = samples[0] if len(samples) == 1 else join(*samples)
        return self.landmark_norm(landmarks * token_scale(self.head_dim)), landmark_mask

    def sample(self, q: Tensor, size: Size, mask: Tensor | None) -> Sample:
        """Landmarks: the prefix, then the samples of the grid."""
        return sample_grid(self.sampler, q, size, mask, self.prefix_tokens)

    def extra_repr(self) -> str:
        if self.middle == "sums":
            return f"softx, {super().extra_repr()}"
        variant = "SOFT++" if self.normalize else "SOFT"
        rows = ", rows=True" if self.rows else ""
        return f"{variant}, {super().extra_repr()}, inverse={self.inverse!r}{rows}"
