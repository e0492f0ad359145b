"""P_q Z P_k^T V, the large part of the attention: everything with an axis of n tokens.

`_plain` is the formula itself, differentiable any number of times. `_Nystrom` computes the same
without forming P, with its gradient in closed form.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .backends import choose
from .backends.tiles import Stack, tile_tokens
from .batching import keep_signature, mapped_axis_first, needs_apply, needs_gradient
from .distances import TO_BASE_2, centred, expanded_exponents, measured
from .inverse import inverse_of_definite
from .precision import without_autocast

LEAST = 1e-30
"""Smaller sums of kernel values have lost their digits in float32."""


def nystrom(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    landmarks: Tensor,
    z: Tensor | None,
    factor: Tensor | None,
    scale: float,
) -> Tensor:
    """P_q Z P_k^T V for stacks of b = images * heads matrices.

    Args:
        q: (images, heads, n, d) queries, in any order of memory.
        k: (images, heads, l, d) keys, or None if they are the queries.
        v: (images, heads, l, e) values.
        landmarks: (b, m, d).
        z: (b, m, m), Z itself, or its inverse B if the factor is given. If None, each row of
            P_k^T V is divided by its last entry; with an entry of 1e-30 or less, all is NaN.
        factor: (b, m, m), lower Cholesky factor of B; Z is then never formed.
        scale: Multiplies tokens and landmarks before they are compared.

    Returns:
        (images, heads, n, e).
    """
    if torch.compiler.is_compiling():
        return _plain(q, k, v, landmarks, z, factor, scale)
    tensors = (q, k, v, landmarks, z, factor)
    function = _Nystrom.apply if needs_apply(*tensors) else _Nystrom.forward
    tokens, keep = tile_tokens(q, k, landmarks), needs_gradient(*tensors)
    return function(*tensors, scale, tokens, keep)[0]


def _plain(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    landmarks: Tensor,
    z: Tensor | None,
    factor: Tensor | None,
    scale: float,
) -> Tensor:
    with without_autocast(q):
        if z is not None and factor is not None:
            z = inverse_of_definite(z)
        centre, right = centred(landmarks, scale * TO_BASE_2)

        def kernel(tokens: Tensor) -> Tensor:
            left = measured(tokens.flatten(0, 1), centre)
            return expanded_exponents(right, left, scale * TO_BASE_2).clamp(max=0).exp2()

        p_q = kernel(q)  # (b, m, n)
        p_k = p_q if k is None else kernel(k)
        s = torch.bmm(p_k, v.flatten(0, 1))
        out = torch.bmm(p_q.mT, _divided(s) if z is None else torch.bmm(z, s))
        return out.unflatten(0, v.shape[:2])


class _Nystrom(torch.autograd.Function):
    """O = P_q Z P_k^T V, and what the backward pass needs of the forward pass.

    Forward:
        S = P_k^T V,   W = Z S,   O = P_q W.
    Backward, with G the gradient of O:
        dW = P_q^T G,   dS = Z^T dW,   dZ = dW S^T,
        dV = P_k dS,    dP_q = G W^T,  dP_k = V dS^T.
    If Z is None, t is the last column of S, W = S / t, and
        dS = dW / t, less (dW * W) 1 / t in the last column.
    If B = Z^-1 is given, Z x is solved with its Cholesky factor, and
        dB = -Z^T dZ Z^T = -dS W^T.
    dP_q and dP_k go on to tokens and landmarks as in `kernel._Kernel`; if the keys are the
    queries, their sum does.

    Where the backward pass is itself differentiated, it goes through `_plain`.
    """

    @staticmethod
    @keep_signature
    def forward(
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        landmarks: Tensor,
        z: Tensor | None,
        factor: Tensor | None,
        scale: float,
        tokens: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        with without_autocast(q):
            stacks, p_q, p_k = choose(q, k).factors(q, k, landmarks, scale, tokens, keep=keep)
            # If the heads of a token lie side by side in the values, they do so in the result.
            same = v.shape[2] == q.shape[2]
            out = torch.empty_like(v) if same else v.new_empty(*q.shape[:3], v.shape[-1])
            s = q.new_empty(*landmarks.shape[:2], v.shape[-1])
            for stack in stacks:
                p_k.contract(stack, v, out=stack.of(s))
                p_q.expand(stack, _multiply(z, factor, stack, stack.of(s)), out=out)
        if not keep:
            return out, None, None, None
        return out, s, p_q.kept, None if k is None else p_k.kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, ctx.scale, ctx.tokens, _ = inputs
        _, *intermediates = output
        ctx.mark_non_differentiable(*(x for x in intermediates if x is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *intermediates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        q, k, v, landmarks, z, factor, s, *kept = ctx.saved_tensors
        if torch.is_grad_enabled() or s is None:
            tensors = (q, k, v, landmarks, z, factor)
            return *_differentiable_gradient(grad, tensors, ctx.scale), *[None] * 4

        with without_autocast(q):
            stacks, p_q, p_k = choose(q, k).factors(
                q, k, landmarks, ctx.scale, ctx.tokens, kept=tuple(kept)
            )
            grad_v, grad_z = torch.empty_like(v), None if z is None else torch.empty_like(z)
            for stack in stacks:
                own_s = stack.of(s)
                grad_w = p_q.contract(stack, grad, out=torch.empty_like(own_s))
                w = _multiply(z, factor, stack, own_s)
                if z is None or grad_z is None:
                    grad_s = grad_w / own_s[..., -1:]
                    grad_s[..., -1] -= (grad_s * w).sum(-1)
                else:
                    grad_s = _multiply(z.mT, factor, stack, grad_w)
                    left, right = (grad_w, own_s) if factor is None else (grad_s.neg(), w)
                    torch.bmm(left, right.mT, out=stack.of(grad_z))
                if k is None:
                    p_q.pull_back(stack, (grad, w), (v, grad_s, grad_v))
                else:
                    p_q.pull_back(stack, (grad, w), None)
                    p_k.pull_back(stack, None, (v, grad_s, grad_v))

        grad_q, grad_landmarks = p_q.gradients()
        grad_k = None
        if k is not None:
            grad_k, more = p_k.gradients()
            grad_landmarks += more
        return grad_q, grad_k, grad_v, grad_landmarks, grad_z, *[None] * 4

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        *tensors, scale, tokens, _ = args
        stacked = (
            None if x is None else mapped_axis_first(x, axis, info.batch_size).flatten(0, 1)
            for x, axis in zip(tensors, in_dims)
        )
        # A mapped backward pass goes through `_plain` and needs no intermediates.
        out, *_ = _Nystrom.apply(*stacked, scale, tokens, False)
        return (out.unflatten(0, (info.batch_size, -1)), None, None, None), (0, None, None, None)


def _divided(s: Tensor) -> Tensor:
    """Rows divided by their last entries; those that are nearly 0 have lost their digits."""
    last = s[..., -1:]
    return s / last.masked_fill(last <= LEAST, math.nan)


def _multiply(z: Tensor | None, factor: Tensor | None, stack: Stack, x: Tensor) -> Tensor:
    """Z x for a part of the stack."""
    if z is None:
        return _divided(x)
    if factor is None:
        return stack.of(z) @ x
    return torch.cholesky_solve(x, stack.of(factor))


def _differentiable_gradient(
    grad: Tensor, tensors: tuple[Any, ...], scale: float
) -> tuple[Tensor | None, ...]:
    """The backward pass through `_plain`, which can be differentiated and mapped."""
    *variables, factor = tensors
    given = [x is not None for x in variables]

    def plain(*tensors: Tensor) -> Tensor:
        left = iter(tensors)
        q, k, v, landmarks, z = (next(left) if there else None for there in given)
        return _plain(q, k, v, landmarks, z, factor, scale)  # type: ignore[arg-type]

    pull_back = torch.func.vjp(plain, *(x for x in variables if x is not None))[1]
    gradients = iter(pull_back(grad))
    return tuple(next(gradients) if there else None for there in given)
