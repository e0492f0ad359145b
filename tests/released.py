"""What the authors' code does that this package does not, for comparing with it."""

import torch
from torch import Tensor

from softmaxfree.ops.inverse import backtracked_alpha

from .conftest import Golden


def released_backtrack(a: Tensor, iters: int, ridge: float) -> Tensor:
    """The release's scheme with its defect: one step size for the whole batch, and the gradient
    taken through all steps and through the step size."""
    alpha = backtracked_for_all(a, 2 / a.sum(-1).max() ** 2)
    z = alpha * a
    for _ in range(iters):
        z = 2 * z - z @ a @ z
    return z


def backtracked_for_all(a: Tensor, alpha: Tensor) -> Tensor:
    """`backtracked_alpha` of all matrices at once: the smallest that any of them needs."""
    return backtracked_alpha(a, alpha.expand(*a.shape[:-2], 1, 1)).min()


def assert_close(got: Tensor, expected: Tensor, golden: Golden, f32: float = 1e-5) -> None:
    tolerance = 1e-10 if golden.dtype == torch.float64 else f32
    scale = max(1.0, expected.abs().max().item())
    assert got.shape == expected.shape
    assert (got - expected).abs().max().item() <= tolerance * scale
