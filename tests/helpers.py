"""Measures and inputs that several tests use."""

import torch
from torch import Tensor


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, in float64; |got| where nothing is expected."""
    got, expected = got.detach().double(), expected.detach().double()
    return ((got - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def kernel_matrices(
    m: int, spread: float, count: int = 3, width: int = 16, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Gaussian kernel matrices, (count, m, m): the smaller the spread, the worse conditioned."""
    x = spread * tokens(count, m, width, seed=m)
    squared = (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)
    return torch.exp(-squared / (2 * width**0.5)).to(dtype)
