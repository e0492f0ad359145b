"""`softmaxfree figures spectrum`: eigenvalues of a bottleneck matrix, and norms against m."""

from pathlib import Path

import torch
from torch import Tensor

from ..bench.measure import exponent
from .drawing import COLORS, axes, save
from .subject import Subject

COUNTS = [49, 100, 196, 324, 576, 1024]


def norms(a: Tensor) -> tuple[Tensor, Tensor]:
    """|A^+| and |D^-1/2 A^+ D^-1/2| of matrices (..., m, m) in float64."""
    inverse = torch.linalg.pinv(a, hermitian=True)
    root = a.sum(-1).rsqrt()
    normalised = root.unsqueeze(-1) * inverse * root.unsqueeze(-2)
    return tuple(torch.linalg.matrix_norm(x, 2) for x in (inverse, normalised))
