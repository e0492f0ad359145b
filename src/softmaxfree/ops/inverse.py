"""The Moore-Penrose inverse of the landmark matrix A, by one of several methods.

All of them take stacks of symmetric positive semi-definite matrices, treat each matrix on its
own, and have the gradient of the inverse in closed form (the paper's `equ:inverse_back`).
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from .backends import choose
from .batching import is_readable, keep_signature, mapped_axis_first, needs_apply
from .checks import check_floating, shape
from .matrices import Ridge, add_ridge, eigenvectors, row_sums
from .precision import compute_dtype, without_autocast
from .tracing import is_exporting

_MOST_LANDMARKS = 2**16
"""An exported graph serves all numbers of landmarks up to this."""

_LARGEST_RIDGE = 1e30
_MOST_STEPS = 1000
_STEADY_STEPS = 20
"""Newton steps in which rounding errors cannot grow to the size of the inverse."""

Method = Callable[[Tensor, int, Ridge], Tensor]
"""(A of shape (..., m, m), iterations, ridge) -> inverse of shape (..., m, m)."""


def pinv(a: Tensor, method: str = "auto", iters: int = 20, ridge: float | None = None) -> Tensor:
    """Moore-Penrose inverse of symmetric positive semi-definite matrices, each on its own.

    Args:
        a: (..., m, m).
        method: A name in `INVERSES`:

            - `auto`: inverse of A + ridge I, by `cholesky` on a CPU, by `rescaled` on an
              accelerator and in exported graphs; the two agree.
            - `cholesky`: the same by a factorisation; a singular matrix gets more ridge.
            - `rescaled`: the same by Newton steps rescaled to the spectrum [ridge, |A|_1];
              matrix products only. Needs a ridge.
            - `newton`: the paper's iteration from a start that always converges.
            - `paper`: its Algorithm 2 to the letter; gives 0 where |A|_1 is an eigenvalue.
            - `damped`, `backtrack`: the iterations of the released SOFT and SOFT++
              checkpoints, with a step size for each matrix.
            - `exact`: by eigendecomposition, the reference.
        iters: Steps of the iterative methods, 1 to 1000. After k steps from alpha A an eigenvalue
            s has become (1 - (1 - alpha s^2)^(2^k)) / s: small ones are suppressed, not inverted.
        ridge: Added to the diagonal. None means 0.01 for `auto`, `rescaled` and `damped`, and
            0 for the others.

    Returns:
        (..., m, m), in a's type. The result for a finite matrix is finite: entries beyond the
        type's range become its largest number. The gradient is that of the inverse, -Y^T G Y^T;
        it can be differentiated again, and is finite where the type can hold the inverse's square.
    """
    check_floating(a=a)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"a must be square matrices (..., m, m), got shape {shape(a)}")
    if a.numel() == 0:
        raise ValueError(f"a is empty: its shape is {shape(a)}")
    checked = Inverse.checked(method, iters, ridge)
    with without_autocast(a):
        of_any_scale = _scaled(INVERSES[checked.method])
        if checked.method in CLOSED_FORM:  # the gradient of the unscaled inverse stays in range
            of_any_scale = closed_form_gradient(of_any_scale)
        inverse = of_any_scale(a.to(compute_dtype(a)), checked.iters, checked.ridge)
        most = torch.finfo(a.dtype).max
        return inverse.clamp(-most, most).to(a.dtype)


def _scaled(method: Method) -> Method:
    """(A / s + ridge / s I)^+ / s, with a power of 2 as s for each matrix: neither squares nor
    sums of its entries leave the type's range."""

    @wraps(method)
    def inverse(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
        size = a.detach().abs().amax((-2, -1), keepdim=True).clamp(min=ridge)
        size = size.clamp(min=torch.finfo(a.dtype).smallest_normal)
        scale = size.log2().ceil().clamp(max=_exponent_of_largest(a.dtype)).exp2()
        if is_readable(scale) and (scale == 1).all():
            return method(a, iters, ridge)
        return method(a / scale, iters, (ridge / scale).squeeze(-1)) / scale

    return inverse


def _exponent_of_largest(dtype: torch.dtype) -> int:
    return int(math.log2(torch.finfo(dtype).max) - 0.5)


class Inverse(NamedTuple):
    """How a landmark matrix is inverted: the arguments of `pinv` after their check."""

    method: str
    iters: int
    ridge: float

    @classmethod
    def checked(
        cls, method: str = "auto", iters: int = 20, ridge: float | None = None
    ) -> "Inverse":
        """Raises UserError for what no inverse can be computed with; None is the default ridge."""
        if method not in INVERSES:
            raise UserError(f"unknown method {method!r}; choose one of {', '.join(INVERSES)}")
        if not isinstance(iters, int) or not 1 <= iters <= _MOST_STEPS:
            raise UserError(f"iters must be a whole number from 1 to {_MOST_STEPS}, got {iters!r}")
        if ridge is None:
            ridge = 0.01 if method in ("auto", "rescaled", "damped") else 0.0
        try:
            ridge = float(ridge)
        except OverflowError:  # a whole number beyond all floats
            ridge = math.inf
        if not (math.isfinite(ridge) and ridge >= 0):
            raise UserError(f"ridge must be a finite number, 0 or more, got {ridge}")
        if ridge > _LARGEST_RIDGE:
            raise UserError(f"ridge must be at most {_LARGEST_RIDGE}, got {ridge}")
        if ridge == 0 and method in ("auto", "rescaled"):
            raise UserError(
                f"method {method!r} needs a ridge above 0; use 'newton' or 'exact' for none"
            )
        return cls(method, iters, ridge)


def kernel_inverse(a: Tensor, inverse: Inverse) -> Tensor:
    """`pinv` of a kernel matrix, whose entries lie in [0, 1].

    |A|_1 is then at most m, which tells how many rescaled steps `auto` needs, and that rounding
    cannot make A + ridge I indefinite.
    """
    method, iters, ridge = inverse
    if method == "auto":
        largest = _MOST_LANDMARKS if is_exporting() else a.shape[-1]
        iters = rescaled_steps(largest, ridge, torch.finfo(a.dtype).eps)
        if _on_cpu(a) and ridge > torch.finfo(a.dtype).eps * a.shape[-1] ** 2:
            return _definite(a, iters, ridge)
    return INVERSES[method](a, iters, ridge)


def closed_form_gradient(method: Method) -> Method:
    """Gives a method the gradient of the inverse, whatever the steps that computed it."""

    @wraps(method)
    def inverse(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
        if needs_apply(a):
            return _Inverse.apply(a, method, iters, ridge)
        return method(a, iters, ridge)

    return inverse


class _Inverse(torch.autograd.Function):
    """Y = A^-1. From dY = -Y dA Y, an output gradient G gives A the gradient -Y^T G Y^T."""

    @staticmethod
    @keep_signature
    def forward(a: Tensor, method: Method, iters: int, ridge: Ridge) -> Tensor:
        return method(a, iters, ridge)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        with without_autocast(grad):
            return -(y.mT @ grad @ y.mT), None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        a: Tensor,
        method: Method,
        iters: int,
        ridge: Ridge,
    ) -> tuple[Tensor, int]:
        a = mapped_axis_first(a, in_dims[0], info.batch_size)
        if isinstance(ridge, Tensor):
            ridge = mapped_axis_first(ridge, in_dims[3], info.batch_size)
        return _Inverse.apply(a, method, iters, ridge), 0


def auto(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
    return (cholesky if _on_cpu(a) else rescaled)(a, iters, ridge)


def _on_cpu(a: Tensor) -> bool:
    return a.device.type == "cpu" and not is_exporting()


def cholesky(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
    return choose(a).inverse(a, ridge)


def rescaled(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
    """Newton steps for a spectrum known to lie in [ridge, |A|_1].

    Before each step the product Z A, its spectrum in [low, 1], is stretched to lie evenly
    around 1; the step then takes the spectrum to [4 low / (1 + low)^2, 1].
    """
    m, shape = a.shape[-1], a.shape
    a = a.reshape(-1, m, m)  # one stack: its products are single nodes of an exported graph
    if isinstance(ridge, Tensor):
        ridge = ridge.expand(*shape[:-2], 1).reshape(-1, 1)
    # At least the rounding error: an eigenvalue that it has made negative would grow.
    least = torch.finfo(a.dtype).eps * row_sums(a).squeeze(-1)
    low = torch.maximum(least, torch.as_tensor(ridge, dtype=a.dtype, device=a.device))
    a = add_ridge(a, low)
    norm = row_sums(a)
    z = torch.eye(m, dtype=a.dtype, device=a.device) / norm
    low = low.unsqueeze(-1) / norm
    for _ in range(iters):
        stretch = 2 / (1 + low)
        z = z * stretch
        z = torch.baddbmm(z, torch.bmm(z, a), z, beta=2, alpha=-1)
        low = low * stretch**2
    if is_readable(z) and not z.isfinite().all():  # A was indefinite from the start
        finite = z.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        z = torch.where(finite, z, _iterate(a, 1.8 / norm**2, iters))
    return z.reshape(shape)


def rescaled_steps(m: int, ridge: float, eps: float) -> int:
    """Rescaled steps after which every eigenvalue of an m x m kernel matrix is inverted."""
    low, steps = max(ridge / (m + ridge), eps**2), 0
    while 1 - low > eps:
        low, steps = 4 * low / (1 + low) ** 2, steps + 1
    return steps


def newton(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
    a = add_ridge(a, ridge)
    return _iterate(a, 1.8 / row_sums(a) ** 2, iters)


def paper(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
    a = add_ridge(a, ridge)
    return _iterate(a, 2 / row_sums(a) ** 2, iters)


def damped(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
    # The release takes the step size before it adds the ridge, which is right for a kernel matrix;
    # where the ridge is most of the matrix, that would diverge.
    alpha = 1.8 / row_sums(a) ** 2
    a = add_ridge(a, ridge)
    return _iterate(a, torch.minimum(alpha, 1.9 / row_sums(a) ** 2), iters)


def backtrack(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
    a = add_ridge(a, ridge)
    return _iterate(a, backtracked_alpha(a, 2 / row_sums(a) ** 2), iters)


def backtracked_alpha(a: Tensor, alpha: Tensor) -> Tensor:
    """alpha halved until |I - alpha A^2|_1 <= 1.01, ten times at most: (..., 1, 1)."""
    square = a @ a
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(10):
        too_long = row_sums(identity - alpha * square) > 1.01
        alpha = torch.where(too_long, alpha / 2, alpha)
    return alpha


def exact(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
    values, vectors = eigenvectors(a)
    largest = values.abs().amax(-1, keepdim=True)
    zero = values <= torch.finfo(a.dtype).eps * a.shape[-1] * largest
    values = torch.where(zero, 0, values) + ridge
    least = 4 * torch.finfo(a.dtype).smallest_normal  # what has an inverse within the type's range
    inverse = torch.where(values > 0, 1 / values.clamp(min=least), 0)
    return (vectors * inverse.unsqueeze(-2)) @ vectors.mT


def _iterate(a: Tensor, alpha: Tensor, iters: int) -> Tensor:
    z = alpha * a
    # A larger Z would be the inverse of rounding errors, and overflow after more steps.
    most = 1 / (torch.finfo(a.dtype).eps * row_sums(a))
    for step in range(iters):
        following = _newton_step(a, z)
        if step >= _STEADY_STEPS:
            following = torch.where(row_sums(following) <= most, following, z)
        z = following
    return z


def _newton_step(a: Tensor, z: Tensor) -> Tensor:
    """2Z - ZAZ; the form Z(2I - AZ) loses digits where A is singular."""
    return 2 * z - z @ a @ z


@closed_form_gradient
def _definite(a: Tensor, iters: int, ridge: Ridge) -> Tensor:
    return choose(a).inverse(a, ridge, definite=True)


def inverse_of_definite(a: Tensor) -> Tensor:
    """The inverse of positive definite matrices, with its gradient in closed form."""
    return _definite(a, 0, 0.0)


INVERSES: dict[str, Method] = {
    method.__name__: closed_form_gradient(method)
    for method in (auto, rescaled, cholesky, newton, paper, damped, backtrack, exact)
}
"""Every method by its name."""

CLOSED_FORM = frozenset(INVERSES)
"""Methods with the gradient in closed form; one that is added to the table keeps its own."""
