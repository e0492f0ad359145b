"""Softmax-free attention: exact and quadratic, or through m landmarks and linear."""

import math

import torch
from torch import Tensor

from ..errors import UserError
from .batching import is_readable, is_wrapped
from .checks import (
    broadcast_leading,
    check_mask,
    check_same_length,
    check_same_width,
    check_tokens,
    finite_where_dropped,
)
from .inverse import Inverse, kernel_inverse
from .kernel import kernel_matrix, token_scale
from .matrices import add_ridge
from .nystrom import LEAST, nystrom
from .precision import compute_dtype, tiny, without_autocast
from .smoothing import smoothing_attention

MIDDLES = ("inverse", "sums")
"""What Z is: the inverse of the landmarks' kernel matrix, or one over the sums of P_k^T w."""

LEAST_SUM = 1e-3
"""Sums of rows are at least this, in units of the largest weight of a key. With an inverse S may
have negative entries, and sums near 0 or below; such rows are divided by this and stay bounded."""

Tokens = tuple[Tensor, Tensor | None, Tensor]
"""Queries; keys, or None if they are the queries; values."""

_TOKENS_OF_AN_IMAGE = 4096
"""Minimum heads x tokens for processing images one at a time."""


def gaussian_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalize: bool = False,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Exact attention with the Gaussian kernel, at quadratic cost: S V, S = `gaussian_kernel`.

    Args:
        q: (..., n, d) queries.
        k: (..., l, d) keys; pass q itself for self-attention.
        v: (..., l, e) values.
        normalize: Divide S_ij by the square roots of the sums of row i and column j. The
            spectral norm is then at most 1; otherwise it grows with the number of tokens.
        mask: (..., l), True for the keys to keep.
        query_mask: (..., n), True for the queries that count in the columns' sums. The default
            is `mask` if k is q, and all queries otherwise.

    Returns:
        (..., n, e), in v's type.
    """
    check_tokens(q=q, k=k, v=v)
    check_same_width(q=q, k=k)
    check_same_length(k=k, v=v)
    leading = broadcast_leading(q=q, k=k, v=v)
    dtype = compute_dtype(q, k, v)
    x, y, values = q.to(dtype), k.to(dtype), v.to(dtype)
    symmetric = k is q and mask is None and query_mask is None
    if query_mask is None and k is q:
        query_mask = mask
    if mask is not None:
        check_mask("mask", mask, leading, k.shape[-2])
        y, values = _dropped_to_mean(y, mask), _dropped_to_zero(values, mask)
    if query_mask is not None:
        check_mask("query_mask", query_mask, leading, q.shape[-2])
        x = finite_where_dropped(x, query_mask)
    with without_autocast(x):
        kernel = kernel_matrix(x, None if symmetric else y, token_scale(q.shape[-1]))
        if mask is not None:
            kernel = kernel * mask.unsqueeze(-2)
        if not normalize:
            return (kernel @ values).to(v.dtype)
        floor = tiny(dtype)
        rows = kernel.sum(-1, keepdim=True).clamp(min=floor).rsqrt()
        columns = rows
        if not symmetric:
            counted = x.new_ones(q.shape[-2]) if query_mask is None else query_mask.to(dtype)
            columns = (kernel.mT @ counted.unsqueeze(-1)).clamp(min=floor).rsqrt()
        return (rows * (kernel @ (columns * values))).to(v.dtype)


def softmax_free_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Tensor,
    normalize: bool = True,
    method: str = "auto",
    iters: int = 20,
    ridge: float | None = None,
    mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
    middle: str = "inverse",
    rows: bool = False,
    log_weights: Tensor | None = None,
) -> Tensor:
    """Attention through landmarks, linear in the number of queries and keys.

    With P the kernel of tokens and landmarks, A that of the landmarks, D = diag(A 1):
    SOFT is P A^+ P^T V (the paper's `eq:reg_attn`), SOFT++ is P D^-1/2 A^+ D^-1/2 P^T V
    (`eq:reg_norm_attn`). Beyond the paper, with a weight w for every key and S = P Z P^T, the rows
    can be divided by their sums, S diag(w) V / S w, and Z can be diag(P^T w)^-1 in place of A^+:
    then no entry is negative, and each row sums to 1.

    Args:
        q: (..., n, d) queries.
        k: (..., l, d) keys; pass q itself for self-attention, which is then cheaper.
        v: (..., l, e) values.
        landmarks: (..., m, d) landmarks, on the scale of q and k.
        normalize: SOFT++ if true, SOFT if not.
        method, iters, ridge: How A is inverted, see `pinv`.
        mask: (..., l), True for the keys to keep.
        landmark_mask: (..., m), True for the landmarks to keep.
        middle: What Z is: `inverse`, as in the paper, or `sums`, which has no inverse and for
            which `normalize` has no meaning.
        rows: Divide rows by their sums, which are taken as 1e-3 (in units of the largest weight)
            where they are smaller. Always so if `middle` is `sums`.
        log_weights: (..., l), the logarithms of the weights of keys, if rows are divided by sums.

    Returns:
        (..., n, e), in v's type. Leading axes are broadcast.
    """
    inverse = Inverse.checked(method, iters, ridge)
    return landmark_attention(
        q, k, v, landmarks, inverse, normalize=normalize, mask=mask, landmark_mask=landmark_mask,
        middle=middle, rows=rows, log_weights=log_weights,
    )  # fmt: skip


def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Tensor,
    inverse: Inverse,
    *,
    normalize: bool = True,
    landmark_scale: float | None = None,
    mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
    middle: str = "inverse",
    rows: bool = False,
    log_weights: Tensor | None = None,
) -> Tensor:
    """`softmax_free_attention` for landmarks with a scale of their own.

    Queries and keys are multiplied by d^(-1/4) before they are compared, landmarks by
    `landmark_scale`, which is d^(-1/4) too if it is None.
    """
    check_tokens(q=q, k=k, v=v, landmarks=landmarks)
    check_same_width(q=q, k=k, landmarks=landmarks)
    check_same_length(k=k, v=v)
    leading = broadcast_leading(q=q, k=k, v=v, landmarks=landmarks)
    dtype = compute_dtype(q, k, v, landmarks)
    queries, values, landmarks = q.to(dtype), v.to(dtype), landmarks.to(dtype)
    keys = None if k is q else k.to(dtype)

    check_middle(middle, inverse)
    if landmark_mask is not None:
        check_mask("landmark_mask", landmark_mask, leading, landmarks.shape[-2])
        landmarks = _dropped_to_zero(landmarks, landmark_mask)
    if mask is not None:
        check_mask("mask", mask, leading, k.shape[-2])
        # A value of 0 takes a key out of P^T V; P itself can stay.
        values = _dropped_to_zero(values, mask)
        if keys is None:
            queries = finite_where_dropped(queries, mask)
        else:
            keys = finite_where_dropped(keys, mask)
    if log_weights is not None:
        _check_weights(log_weights, leading, k.shape[-2], divided=rows or middle == "sums")
        log_weights = log_weights.to(dtype)
    scale = token_scale(q.shape[-1])
    own_scale = scale if landmark_scale is None else landmark_scale
    if middle == "sums":
        landmarks = _rescaled(landmarks, own_scale, scale)
        with without_autocast(queries):
            out = _without_inverse(
                (queries, keys, values), landmarks, leading, scale, log_weights, mask, landmark_mask
            )
        return out.to(v.dtype)
    if rows:
        values = with_weights(values, log_weights, mask)
    tokens = _by_image(leading, queries, keys, values)
    with without_autocast(queries):
        if landmark_mask is None and _solves(inverse.method, landmarks, tokens):
            landmarks = _stacked(_rescaled(landmarks, own_scale, scale), leading)
            out = _solve_each(tokens, landmarks, scale, inverse, normalize)
        else:
            a = kernel_matrix(landmarks, scale=own_scale)
            z = middle_matrix(a, inverse, normalize, landmark_mask)
            landmarks = _stacked(_rescaled(landmarks, own_scale, scale), leading)
            out = nystrom(*tokens, landmarks, _stacked(z, leading), None, scale)
    out = out.reshape(*leading, *out.shape[-2:])
    if rows:
        out = out[..., :-1] / out[..., -1:].clamp(min=LEAST_SUM)
    return out.to(v.dtype)


def _without_inverse(
    tokens: Tokens,
    landmarks: Tensor,
    leading: torch.Size,
    scale: float,
    log_weights: Tensor | None,
    mask: Tensor | None,
    landmark_mask: Tensor | None,
) -> Tensor:
    """Z = diag(P_k^T w)^-1, with rows divided by their sums: in tiles, as with an inverse.

    The kernel's values may all be 0 for a query or a landmark that is far from the others. Softmax,
    which takes longer, has no such limit.
    """
    q, k, v = tokens
    given = [x for x in (*tokens, landmarks) if x is not None]
    if landmark_mask is None and all(map(is_readable, given)):
        images = _by_image(leading, q, k, with_weights(v, log_weights, mask))
        out = nystrom(*images, _stacked(landmarks, leading), None, None, scale)
        out = out.reshape(*leading, *out.shape[-2:])
        sums = out[..., -1:]
        if sums.detach().amin() > LEAST:  # false if it is not a number
            return out[..., :-1] / sums
    q, k, v, landmarks = (
        x.expand(*leading, -1, -1) for x in (q, q if k is None else k, v, landmarks)
    )
    return smoothing_attention(q, k, v, landmarks, scale, log_weights, mask, landmark_mask)


def _stacked(matrices: Tensor, leading: torch.Size) -> Tensor:
    """(..., m, d) -> (b, m, d)."""
    return matrices.expand(*leading, -1, -1).reshape(-1, *matrices.shape[-2:])


def check_middle(middle: str, inverse: Inverse) -> None:
    """Refuses an unknown Z, and settings of an inverse where there is none."""
    if middle not in MIDDLES:
        raise UserError(f"middle must be one of {', '.join(MIDDLES)}, got {middle!r}")
    if middle == "sums" and inverse != Inverse.checked("auto", 20, None):
        raise UserError(
            "with middle='sums' nothing is inverted: leave inverse, iters and ridge out, or pass "
            "middle='inverse'"
        )


def _check_weights(log_weights: Tensor, leading: torch.Size, keys: int, divided: bool) -> None:
    if not divided:
        raise ValueError(
            "log_weights are given, but rows are not divided by their sums; pass rows=True"
        )
    expected = (*leading, keys)
    fits = log_weights.ndim == len(expected) and all(
        got in (1, want) for got, want in zip(log_weights.shape, expected)
    )
    if not fits or log_weights.shape[-1] != keys:
        raise ValueError(f"log_weights must be {expected}, got {tuple(log_weights.shape)}")


def with_weights(values: Tensor, log_weights: Tensor | None, mask: Tensor | None) -> Tensor:
    """[w v, w] for weights w: (..., l, e) -> (..., l, e + 1). The largest weight is 1."""
    if log_weights is None:
        ones = torch.ones_like(values[..., :1])
        weights = ones if mask is None else _dropped_to_zero(ones, mask)
    else:
        if mask is not None:
            log_weights = log_weights.masked_fill(~mask, -math.inf)
        largest = log_weights.detach().amax(-1, keepdim=True)
        weights = (log_weights - largest.nan_to_num(neginf=0.0)).exp().unsqueeze(-1)
        values = values * weights
    return torch.cat([values, weights.expand(*values.shape[:-1], 1)], -1)


def _by_image(leading: torch.Size, q: Tensor, k: Tensor | None, v: Tensor) -> Tokens:
    """Tokens (..., n, d) -> (images, heads, n, d).

    The heads of a token may lie side by side in memory. If one image fills tiles, they stay
    there; otherwise all images are copied into one large stack, treated as a single image.
    """
    stay = (
        not torch.compiler.is_compiling()
        and len(leading) == 2
        and q.device.type == "cpu"
        and leading[1] * q.shape[-2] >= _TOKENS_OF_AN_IMAGE
    )

    def images(x: Tensor) -> Tensor:
        x = x.expand(*leading, -1, -1)
        return x if stay else x.reshape(1, -1, *x.shape[-2:])

    return images(q), None if k is None else images(k), images(v)


def _rescaled(landmarks: Tensor, own: float, scale: float) -> Tensor:
    """Converts landmarks from their own scale to the tokens' scale."""
    return landmarks if own == scale else landmarks * (own / scale)


def _dropped_to_zero(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.masked_fill(~mask.unsqueeze(-1), 0)


def _dropped_to_mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Moves dropped tokens to the mean of the others, so that the kernel's centre stays there."""
    tokens = _dropped_to_zero(tokens, mask)
    count = mask.sum(-1)[..., None, None].clamp(min=1)
    return torch.where(mask.unsqueeze(-1), tokens, tokens.detach().sum(-2, keepdim=True) / count)


def _solves(method: str, landmarks: Tensor, tokens: Tokens) -> bool:
    """Whether to solve with a factor of A and not to invert A: faster with many landmarks."""
    return (
        method in ("auto", "cholesky")
        and is_readable(landmarks)
        and landmarks.shape[-2] > 128
        and not any(x is not None and is_wrapped(x) for x in tokens)
    )


def _solve_each(
    tokens: Tokens, landmarks: Tensor, scale: float, inverse: Inverse, normalize: bool
) -> Tensor:
    """One matrix after the other: at this size each fills the cache by itself."""
    q, k, v = tokens
    q, v = q.flatten(0, 1).unsqueeze(0), v.flatten(0, 1).unsqueeze(0)
    k = None if k is None else k.flatten(0, 1).unsqueeze(0)
    results = []
    for i, some in enumerate(landmarks.split(1)):
        a = kernel_matrix(some, scale=scale)
        middle = add_ridge(a, inverse.ridge)
        if normalize:
            middle = _normalized(middle, a, 0.5)
        factor: Tensor | None
        factor, failed = torch.linalg.cholesky_ex(middle.detach())
        if failed.any():
            middle, factor = middle_matrix(a, inverse, normalize), None
        one = slice(i, i + 1)
        own_k = None if k is None else k[:, one]
        results.append(nystrom(q[:, one], own_k, v[:, one], some, middle, factor, scale))
    return torch.cat(results, 1)


def middle_matrix(
    a: Tensor, inverse: Inverse, normalize: bool, landmark_mask: Tensor | None = None
) -> Tensor:
    """Z, which stands between P and P^T: A^+ or D^-1/2 A^+ D^-1/2, (..., m, m).

    The row and column of a dropped landmark are 0, which takes its column out of P.
    """
    if landmark_mask is not None:
        a = without_dropped(a, landmark_mask)
    z = kernel_inverse(a, inverse)
    if normalize:
        z = _normalized(z, a, -0.5)
    return z if landmark_mask is None else z * _pairs(landmark_mask)


def _normalized(x: Tensor, a: Tensor, power: float) -> Tensor:
    """D^p X D^p, D = diag(A 1): SOFT++ has p = -1/2 for an inverse of A, 1/2 for A itself."""
    root = a.sum(-1) ** power
    return x * (root.unsqueeze(-1) * root.unsqueeze(-2))


def without_dropped(a: Tensor, landmark_mask: Tensor) -> Tensor:
    """A (..., m, m) with rows and columns of the identity for dropped landmarks."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.where(_pairs(landmark_mask), a, identity)


def _pairs(kept: Tensor) -> Tensor:
    return kept.unsqueeze(-1) & kept.unsqueeze(-2)
