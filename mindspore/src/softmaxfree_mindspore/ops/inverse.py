"""The Moore-Penrose inverse of the landmark matrix A, by Newton steps of several kinds.

All of them take stacks of symmetric positive semi-definite matrices, treat each matrix alone,
need matrix products only, and have the gradient of the inverse in closed form (the paper's
`equ:inverse_back`).
"""

import math
from collections.abc import Callable
from functools import cache, partial

from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from .checks import check_floating
from .precision import EPS, TINY, widened
from .products import product, product_t, t_product

Method = Callable[[Tensor, int, float], Tensor]
"""(A of shape (..., m, m), iterations, ridge) -> inverse of shape (..., m, m)."""


def pinv(a: Tensor, method: str = "auto", iters: int = 20, ridge: float | None = None) -> Tensor:
    """Moore-Penrose inverse of symmetric positive semi-definite matrices, each by itself.

    Args:
        a: (..., m, m).
        method: A name in `INVERSES`:

            - `auto`, `rescaled`: inverse of A + ridge I, by Newton steps rescaled to the spectrum
              [ridge, |A|_1]. Needs a ridge.
            - `newton`: the paper's iteration from a start that always converges.
            - `paper`: its Algorithm 2 to the letter; gives 0 where |A|_1 is an eigenvalue.
            - `damped`, `backtrack`: the iterations of the released SOFT and SOFT++
              checkpoints, with a step size for each matrix.
        iters: Steps. After k steps from alpha A an eigenvalue s has become
            (1 - (1 - alpha s^2)^(2^k)) / s: small ones are suppressed, not inverted.
        ridge: Added to the diagonal. None means 0.01 for `auto`, `rescaled` and `damped`, and
            0 for the others.

    Returns:
        (..., m, m), in a's type. The gradient is that of the inverse, -Y^T G Y^T.
    """
    check_floating(a=a)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or a.size == 0:
        raise ValueError(f"a must be square matrices (..., m, m), got shape {a.shape}")
    return _inverse(method, iters, check_inverse(method, iters, ridge))(widened(a)).astype(a.dtype)


def check_inverse(method: str, iters: int, ridge: float | None) -> float:
    """Refuses what no inverse can be computed with; returns the ridge that None stands for."""
    if method not in INVERSES:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(INVERSES)}")
    if iters < 1:
        raise ValueError(f"iters must be at least 1, got {iters}")
    if ridge is None:
        return 0.01 if method in ("auto", "rescaled", "damped") else 0.0
    if not (math.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"ridge must be a finite number, 0 or more, got {ridge}")
    if ridge == 0 and method in ("auto", "rescaled"):
        raise ValueError(f"method {method!r} needs a ridge above 0; use 'newton' for none")
    return float(ridge)


def kernel_inverse(method: str, iters: int, ridge: float | None) -> nn.Cell:
    """The inverse of kernel matrices, whose entries lie in [0, 1].

    |A|_1 is then at most m, which tells how many rescaled steps `auto` needs.
    """
    ridge = check_inverse(method, iters, ridge)
    return (
        ClosedForm(_auto_of_kernel, iters, ridge)
        if method == "auto"
        else INVERSES[method](iters, ridge)
    )


class ClosedForm(nn.Cell):
    """A method with the gradient of the inverse, whatever the steps that computed it."""

    def __init__(self, method: Method, iters: int, ridge: float) -> None:
        super().__init__()
        self.method, self.iters, self.ridge = method, iters, ridge

    def construct(self, a: Tensor) -> Tensor:
        """(..., m, m) -> (..., m, m)."""
        return self.method(a, self.iters, self.ridge)

    def bprop(self, a: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (-product_t(t_product(out, dout), out),)


def rescaled(a: Tensor, iters: int, ridge: float) -> Tensor:
    """Newton steps for a spectrum known to lie in [ridge, |A|_1].

    Before each step the product Z A, its spectrum in [low, 1], is stretched to lie evenly
    around 1; the step then takes the spectrum to [4 low / (1 + low)^2, 1].
    """
    a = _add_ridge(a, ridge)
    norm = _row_sums(ops.abs(a))
    z = _identity(a) / norm
    low = ridge / norm
    for _ in range(iters):
        z = _newton_step(a, z * (2 / (1 + low)))
        low = 4 * low / ops.square(1 + low)
    return z


@constexpr
def rescaled_steps(m: int, ridge: float, eps: float) -> int:
    """Rescaled steps after which every eigenvalue of an m x m kernel matrix is inverted."""
    low, steps = max(ridge / (m + ridge), eps**2), 0
    while 1 - low > eps:
        low, steps = 4 * low / (1 + low) ** 2, steps + 1
    return steps


def _auto_of_kernel(a: Tensor, iters: int, ridge: float) -> Tensor:
    return rescaled(a, rescaled_steps(a.shape[-1], ridge, EPS), ridge)


def newton(a: Tensor, iters: int, ridge: float) -> Tensor:
    a = _add_ridge(a, ridge)
    return _iterate(a, 1.8 / ops.square(_row_sums(ops.abs(a))), iters)


def paper(a: Tensor, iters: int, ridge: float) -> Tensor:
    a = _add_ridge(a, ridge)
    return _iterate(a, 2 / ops.square(_row_sums(ops.abs(a))), iters)


def damped(a: Tensor, iters: int, ridge: float) -> Tensor:
    # The release takes the step size before it adds the ridge.
    return _iterate(_add_ridge(a, ridge), 1.8 / ops.square(_row_sums(a)), iters)


def backtrack(a: Tensor, iters: int, ridge: float) -> Tensor:
    a = _add_ridge(a, ridge)
    return _iterate(a, backtracked_alpha(a, 2 / ops.square(_row_sums(a))), iters)


def backtracked_alpha(a: Tensor, alpha: Tensor) -> Tensor:
    """alpha halved until |I - alpha A^2|_1 <= 1.01, ten times at most: (..., 1, 1)."""
    square, identity = product(a, a), _identity(a)
    for _ in range(10):
        too_long = _row_sums(ops.abs(identity - alpha * square)) > 1.01
        alpha = ops.where(too_long, alpha / 2, alpha)
    return alpha


def _iterate(a: Tensor, alpha: Tensor, iters: int) -> Tensor:
    z = alpha * a
    for _ in range(iters):
        z = _newton_step(a, z)
    return z


def _newton_step(a: Tensor, z: Tensor) -> Tensor:
    """2Z - ZAZ; the form Z(2I - AZ) loses digits where A is singular."""
    return 2 * z - product(product(z, a), z)


def _row_sums(a: Tensor) -> Tensor:
    """The largest row sum of each matrix, (..., 1, 1): |A|_1 where A is symmetric and >= 0."""
    return ops.clamp(ops.amax(a.sum(-1, keepdims=True), -2, True), min=TINY)


def _add_ridge(a: Tensor, ridge: float) -> Tensor:
    return a + ridge * _identity(a)


def _identity(a: Tensor) -> Tensor:
    return ops.eye(a.shape[-1], a.shape[-1], a.dtype)


INVERSES: dict[str, Callable[[int, float], nn.Cell]] = {
    "auto": partial(ClosedForm, rescaled),
    **{
        method.__name__: partial(ClosedForm, method)
        for method in (rescaled, newton, paper, damped, backtrack)
    },
}
"""Every method by its name: makes a cell of the iterations and the ridge."""


@cache
def _inverse(method: str, iters: int, ridge: float) -> nn.Cell:
    return INVERSES[method](iters, ridge)  # kept, and in graph mode compiled, once
