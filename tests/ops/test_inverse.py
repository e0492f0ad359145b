"""The inverse: every method against the eigenvalues it should have, and its gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softmaxfree import pinv
from softmaxfree.errors import UserError
from softmaxfree.ops import reference
from softmaxfree.ops.inverse import INVERSES, Inverse, kernel_inverse, rescaled_steps
from softmaxfree.ops.matrices import eigenvalues

from ..helpers import kernel_matrices, relative_error, tokens

ITERATIVE = ["newton", "paper", "damped", "backtrack"]


def step_size(a: Tensor, method: str) -> Tensor:
    """alpha of each method, as published, for each matrix."""
    norm = a.sum(-1).amax(-1)[..., None, None]
    if method != "backtrack":
        return {"newton": 1.8, "paper": 2.0, "damped": 1.8}[method] / norm**2
    alphas = []
    for matrix in a:
        alpha = 2 / matrix.sum(-1).max() ** 2
        for _ in range(10):
            rest = torch.eye(a.shape[-1], dtype=a.dtype) - alpha * matrix @ matrix
            if rest.abs().sum(-1).max() <= 1.01:
                break
            alpha = alpha / 2
        alphas.append(alpha)
    return torch.stack(alphas)[:, None, None]


@pytest.mark.parametrize("method", ITERATIVE)
@pytest.mark.parametrize("iters", [1, 5, 20])
@pytest.mark.parametrize("spread", [2.0, 0.5, 0.05], ids=["well", "medium", "ill"])
def test_iterations_have_the_predicted_eigenvalues(method: str, iters: int, spread: float) -> None:
    """(1 - (1 - alpha s^2)^(2^k)) / s, also where they have not converged."""
    a = kernel_matrices(12, spread)
    alpha = step_size(a, method)
    iterated = a + (0.01 * torch.eye(12, dtype=a.dtype) if method == "damped" else 0)
    expected = reference.newton(iterated, alpha, iters)
    assert relative_error(pinv(a, method, iters), expected) < 1e-6


@pytest.mark.parametrize("method", INVERSES)
def test_all_methods_agree_on_well_conditioned_matrices(method: str) -> None:
    a = kernel_matrices(10, 3.0)
    ridge = 0.01
    error = relative_error(pinv(a, method, iters=40, ridge=ridge), reference.pinv(a, ridge))
    assert error < 1e-10


@pytest.mark.parametrize("m", [1, 2, 49])
@pytest.mark.parametrize("method", INVERSES)
def test_a_constant_image_has_a_finite_inverse(method: str, m: int) -> None:
    """All tokens equal: A is all ones, of rank 1, and |A|_1 is its eigenvalue."""
    z = pinv(torch.ones(2, m, m), method)
    assert z.isfinite().all()
    if method == "paper":
        # On the edge of convergence: one step from alpha = 2 / |A|_1^2 gives 0, and 0 stays,
        # up to rounding; 1 / m^2 is right.
        assert z.abs().max() < 0.5 / m**2
    elif method in ("newton", "exact"):
        assert torch.allclose(z, torch.full_like(z, 1 / m**2), rtol=1e-3, atol=1e-6)


def test_the_papers_start_loses_the_identity() -> None:
    """Algorithm 2 to the letter gives 0 for A = I; `newton` starts where it converges."""
    identity = torch.eye(16, dtype=torch.float64)
    assert pinv(identity, "paper").abs().max() == 0
    assert torch.allclose(pinv(identity, "newton"), identity, atol=1e-12)


@pytest.mark.parametrize(
    ("m", "tolerance"), [(49, 1e-4), (256, 2e-3), pytest.param(1024, 2e-3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("spread", [1.0, 0.1, 0.01], ids=["usual", "close", "nearly-constant"])
def test_cholesky_and_rescaled_agree_in_float32(m: int, tolerance: float, spread: float) -> None:
    """So a model gives the same answer on a CPU and on an accelerator."""
    a = kernel_matrices(m, spread, count=2, width=32, dtype=torch.float32)
    steps = rescaled_steps(m, 0.01, torch.finfo(a.dtype).eps)
    rescaled = INVERSES["rescaled"](a, steps, 0.01)
    assert steps < 15
    assert relative_error(rescaled, pinv(a, "cholesky", ridge=0.01)) < tolerance
    assert torch.equal(kernel_inverse(a, Inverse.checked()), pinv(a))


@pytest.mark.parametrize("method", INVERSES)
def test_gradients_are_those_of_the_inverse(method: str) -> None:
    a = kernel_matrices(5, 2.0, count=2)

    def inverse(x: Tensor) -> Tensor:
        return pinv((x + x.mT) / 2, method, iters=40, ridge=0.01)

    a.requires_grad_()
    assert torch.autograd.gradcheck(inverse, (a,))
    assert torch.autograd.gradgradcheck(inverse, (a,))


@pytest.mark.parametrize("method", INVERSES)
def test_the_backward_pass_is_the_closed_form(method: str) -> None:
    """-Y^T G Y^T of what was computed, converged or not."""
    a = kernel_matrices(9, 0.1).requires_grad_()
    z = pinv(a, method, iters=3)
    g = torch.randn_like(z)
    (gradient,) = torch.autograd.grad(z, a, g)
    assert torch.allclose(gradient, -z.mT @ g @ z.mT, rtol=1e-10)


@pytest.mark.parametrize("method", INVERSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_a_matrix_is_treated_alone(method: str, dtype: torch.dtype) -> None:
    m = 16
    mates = torch.stack([torch.ones(m, m), torch.eye(m), 1e-3 * torch.eye(m) + 1]).to(dtype)
    a = torch.cat([kernel_matrices(m, 1.0, dtype=dtype), mates])
    alone = torch.stack([pinv(matrix, method) for matrix in a])
    assert relative_error(pinv(a, method)[:3], alone[:3]) < (
        1e-5 if dtype == torch.float32 else 1e-12
    )


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(1, 24),
    spread=st.floats(0.0, 3.0),
    method=st.sampled_from(sorted(INVERSES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_finite_and_in_the_callers_type(
    m: int, spread: float, method: str, dtype: torch.dtype
) -> None:
    a = kernel_matrices(m, spread, count=2, dtype=dtype)
    z = pinv(a, method)
    assert z.dtype == dtype
    # In float16 an inverse may be out of range; in the others nothing is.
    assert z.isfinite().all() or (dtype == torch.float16 and z.abs().max() == math.inf)


@pytest.mark.parametrize("method", INVERSES)
def test_compiles_without_breaks_and_maps(method: str) -> None:
    """In one graph with its gradient, and under `vmap` of `grad`."""
    a = kernel_matrices(6, 2.0)

    def loss(a: Tensor) -> Tensor:
        return pinv(a, method).square().sum()

    (expected,) = torch.autograd.grad(loss(a.requires_grad_()), a)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(a), a)
    assert relative_error(got, expected) < 1e-10
    assert relative_error(torch.func.vmap(torch.func.grad(loss))(a.detach()), expected) < 1e-10
    mapped = torch.func.vmap(lambda a: pinv(a, method))(a.detach())
    assert relative_error(mapped, pinv(a, method)) < 1e-12


@pytest.mark.parametrize("method", INVERSES)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1e-10, 1e10, 1e36])
def test_finite_for_matrices_of_any_scale(method: str, size: float) -> None:
    x = tokens(3, 9, 4, dtype=torch.float32)
    gram = x @ x.mT  # singular, with negative entries
    a = torch.cat([gram, kernel_matrices(9, 1.0, dtype=torch.float32)]) * size
    assert pinv(a, method).isfinite().all()


@pytest.mark.parametrize("method", INVERSES)
def test_the_scale_of_a_matrix_is_the_inverse_s(method: str) -> None:
    a = kernel_matrices(9, 2.0, dtype=torch.float32)
    expected = pinv(a, method, ridge=0.01)
    for scale in (2.0**-60, 2.0**60):
        got = pinv(a * scale, method, ridge=0.01 * scale) * scale
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("method", INVERSES)
def test_a_matrix_that_is_not_finite_leaves_the_others_alone(method: str) -> None:
    a = kernel_matrices(9, 2.0, dtype=torch.float32)
    broken = a.clone()
    broken[1, 2, 3] = torch.nan
    got, expected = pinv(broken, method), pinv(a, method)
    assert got[1].isnan().any()
    assert relative_error(got[::2], expected[::2]) < 1e-5


def graded(m: int, orders: float, seed: int) -> Tensor:
    """A definite matrix in float32 whose rows and columns are orders of magnitude apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, m, generator=generator)
    sizes = 10.0 ** (-orders * torch.rand(m, generator=generator))
    return x @ x.mT * sizes.unsqueeze(-1) * sizes


def test_matrices_on_which_lapack_gives_up_are_inverted() -> None:
    """Its eigenvalues do not converge for this one, with OpenBLAS or MKL as torch comes with."""
    a = graded(10, 22, seed=64) * 2.0**-50
    inverse = pinv(a, "exact", ridge=1.0)
    assert torch.allclose(inverse, torch.eye(10), atol=1e-6)
    # Of this one they are NaN, without a word.
    assert pinv(graded(20, 20, seed=42) * 1e-41, "exact").isfinite().all()


def test_where_no_eigenvalues_are_found_singular_values_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when LAPACK gives up: the same inverse, gradient and eigenvalues, or a sentence."""
    a = torch.cat([kernel_matrices(9, 2.0), kernel_matrices(9, 0.0)])  # the last of rank 1
    a[0, 0, 0] = torch.nan
    a.requires_grad_()
    expected, values = pinv(a, "exact", ridge=1e-3), eigenvalues(a)
    (gradient,) = torch.autograd.grad(expected[1:].sum(), a)

    def gives_up(*_: Tensor) -> None:
        raise torch.linalg.LinAlgError("failed to converge.")

    monkeypatch.setattr(torch.linalg, "eigh", gives_up)
    monkeypatch.setattr(torch.linalg, "eigvalsh", gives_up)
    got = pinv(a, "exact", ridge=1e-3)
    assert got[0].isnan().all()
    assert relative_error(got[1:], expected[1:]) < 1e-10
    (again,) = torch.autograd.grad(got[1:].sum(), a)
    assert relative_error(again[1:], gradient[1:]) < 1e-10
    assert eigenvalues(a)[0].isnan().all()
    assert torch.allclose(eigenvalues(a)[1:], values[1:], atol=1e-12)

    monkeypatch.setattr(torch.linalg, "svd", gives_up)
    with pytest.raises(UserError, match=r"not found \(failed to converge\): choose .* 'auto'"):
        pinv(a, "exact")


@pytest.mark.parametrize("method", INVERSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_more_steps_than_rounding_allows_stay_finite(method: str, dtype: torch.dtype) -> None:
    """Of singular matrices, where Newton's steps double the rounding errors."""
    x = tokens(3, 16, 4, dtype=dtype)
    a = torch.cat(
        [x @ x.mT, torch.ones(1, 16, 16, dtype=dtype), kernel_matrices(16, 0.1).to(dtype)]
    )
    for iters in (64, 200):
        assert pinv(a, method, iters, ridge=1e-30).isfinite().all()


@pytest.mark.parametrize("method", INVERSES)
@pytest.mark.parametrize("ridge", [1e-12, 1e-45, 5e-324])
def test_tiny_ridges_give_finite_results(method: str, ridge: float) -> None:
    """Also where the ridge is nothing beside the matrix, or has no inverse in the type."""
    a = torch.stack([torch.ones(8, 8), 1e33 * torch.ones(8, 8), graded(8, 20, seed=1)])
    assert pinv(a, method, ridge=ridge).isfinite().all()
    assert pinv(a.double(), method, ridge=ridge).isfinite().all()


def test_definite_matrices_whose_inverse_is_out_of_range_get_a_ridge() -> None:
    a = graded(3, 22, seed=173)  # it can be factorised, and its inverse has entries of 1e40
    assert pinv(a, "cholesky").isfinite().all()
    assert torch.func.vmap(lambda a: pinv(a, "cholesky"))(a[None]).isfinite().all()


def test_bad_input_is_named() -> None:
    a = kernel_matrices(4, 1.0)
    with pytest.raises(
        ValueError, match=r"square matrices \(\.\.\., m, m\), got shape \(3, 4, 3\)"
    ):
        pinv(a[..., :3])
    with pytest.raises(ValueError, match="unknown method 'svd'; choose one of auto, rescaled"):
        pinv(a, "svd")
    for iters in (2.5, "3"):
        with pytest.raises(ValueError, match=r"iters must be a whole number .* got"):
            pinv(torch.eye(3), iters=iters)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="iters must be a whole number from 1 to 1000, got 0"):
        pinv(a, iters=0)
    with pytest.raises(
        ValueError, match="iters must be a whole number from 1 to 1000, got 1000000"
    ):
        pinv(a, iters=10**6)
    with pytest.raises(ValueError, match="ridge must be a finite number, 0 or more, got -1"):
        pinv(a, ridge=-1)
    with pytest.raises(ValueError, match="ridge must be a finite number, 0 or more, got inf"):
        pinv(a, ridge=10**400)
    with pytest.raises(ValueError, match="ridge must be at most 1e\\+30, got 1e\\+300"):
        pinv(a, ridge=1e300)
    with pytest.raises(ValueError, match="'rescaled' needs a ridge above 0"):
        pinv(a, "rescaled", ridge=0)
    with pytest.raises(ValueError, match="floating-point type"):
        pinv(a.long())
    with pytest.raises(ValueError, match="a is empty"):
        pinv(a[:0])
