"""Operations that `torch.utils.flop_counter.FlopCounterMode` would not count by itself."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = Sequence[int]
aten = torch.ops.aten


def in_place_product(out: Shape, left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """out += left right, of stacks of matrices."""
    return 2 * math.prod(out) * left[-1]


def cholesky(a: Shape, *_: Any, **__: Any) -> int:
    return _stack(a) * a[-1] ** 3 // 3


def inverse_by_factor(factor: Shape, *_: Any, **__: Any) -> int:
    return _stack(factor) * 2 * factor[-1] ** 3 // 3


def solution_by_factor(right: Shape, factor: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(right) * factor[-1]


def eigenvectors(a: Shape, *_: Any, **__: Any) -> int:
    """To tridiagonal form, there by QR steps, and back: about 9 m^3."""
    return _stack(a) * 9 * a[-1] ** 3


def fused_attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Scores of all pairs, and their products with the values; older versions of torch left the
    CPU's out."""
    return 2 * _stack(q) * q[-2] * k[-2] * (q[-1] + v[-1])


def _stack(matrices: Shape) -> int:
    return math.prod(matrices[:-2])


_FORMULAS: dict[Any, Any] = {
    aten.baddbmm_: in_place_product,
    aten.linalg_cholesky_ex: cholesky,
    aten.cholesky_inverse: inverse_by_factor,
    aten.cholesky_solve: solution_by_factor,
    aten._linalg_eigh: eigenvectors,
    aten._scaled_dot_product_flash_attention_for_cpu: fused_attention,
}
for operation, formula in _FORMULAS.items():
    if operation not in flop_registry:
        register_flop_formula(operation)(formula)
