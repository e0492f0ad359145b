"""The paper's six propositions, where they are true, and a counter-example where one is not."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softmaxfree import gaussian_attention, gaussian_kernel, pinv
from softmaxfree.ops import reference

from ..helpers import kernel_matrices, relative_error, tokens

sizes = st.integers(2, 24)
spreads = st.floats(0.2, 3.0)


@settings(deadline=None, max_examples=30)
@given(m=sizes, rank=st.integers(1, 24), spread=spreads)
def test_1_newton_converges_to_the_moore_penrose_inverse(m: int, rank: int, spread: float) -> None:
    """Of singular matrices too: some of these have repeated tokens."""
    distinct = spread * tokens(min(m, rank), 8)
    x = distinct[torch.arange(m) % len(distinct)]
    a = reference.gaussian_kernel(x, x)
    smallest = torch.linalg.eigvalsh(reference.gaussian_kernel(distinct, distinct)).min()
    if smallest > 1e-2:
        assert relative_error(pinv(a, "newton", iters=30), torch.linalg.pinv(a)) < 1e-6


@settings(deadline=None, max_examples=30)
@given(m=sizes, spread=spreads)
def test_2_the_errors_decrease_at_every_step(m: int, spread: float) -> None:
    a = kernel_matrices(m, spread, count=1)[0]
    exact = torch.linalg.pinv(a, hermitian=True)

    def spectral_norm(x: torch.Tensor) -> float:
        return torch.linalg.matrix_norm(x, 2).item()

    steps = [pinv(a, "newton", iters=k) for k in range(1, 25)]
    residuals = [spectral_norm(a @ z @ a - a) for z in steps]
    distances = [spectral_norm(z - exact) for z in steps]
    for errors in (residuals, distances):
        assert all(after <= before + 1e-9 * errors[0] for before, after in pairwise(errors))


@settings(deadline=None, max_examples=30)
@given(n=sizes, spread=spreads)
def test_3_softmax_attention_has_eigenvalues_up_to_1(n: int, spread: float) -> None:
    """With Q = K, as the proof assumes: D^-1 A of a symmetric positive definite A."""
    q = spread * tokens(n, 8)
    values = torch.linalg.eigvals((q @ q.mT / 8**0.5).softmax(-1))
    assert values.real.max() <= 1 + 1e-9
    assert values.real.min() >= -1e-9


@settings(deadline=None, max_examples=30)
@given(n=sizes, spread=st.floats(0.0, 3.0))
def test_4_gaussian_attention_has_eigenvalues_up_to_n(n: int, spread: float) -> None:
    """With equality for a constant image; normalised, they are at most 1."""
    q = spread * tokens(n, 8)
    values = torch.linalg.eigvalsh(gaussian_kernel(q, q))
    assert values.max() <= n + 1e-9
    assert values.min() >= -1e-9
    constant = torch.ones(n, 8, dtype=torch.float64)
    assert torch.linalg.eigvalsh(gaussian_kernel(constant, constant)).max() > n - 1e-9
    normalized = gaussian_attention(q, q, torch.eye(n, dtype=q.dtype), normalize=True)
    assert torch.linalg.matrix_norm(normalized, 2) <= 1 + 1e-9


def two_tokens(distance: float) -> torch.Tensor:
    return torch.tensor([[0.0], [distance]], dtype=torch.float64)


def test_5_and_6_are_not_true_of_every_kernel_matrix() -> None:
    """|A^+| = O(m^2) and |D^-1/2 A^+ D^-1/2| = O(m) hold for no constant: two tokens that come
    close make both norms as large as one likes, at m = 2 and k = 1 connected part."""
    for distance in (1e-1, 1e-2, 1e-3):
        a = gaussian_kernel(two_tokens(distance), two_tokens(distance))
        inverse = torch.linalg.inv(a)
        root = a.sum(-1).rsqrt()
        assert torch.linalg.matrix_norm(inverse, 2) > 1 / distance**2
        assert torch.linalg.matrix_norm(root[:, None] * inverse * root, 2) > 0.5 / distance**2


@settings(deadline=None, max_examples=30)
@given(m=sizes, spread=st.floats(0.0, 3.0))
def test_5_and_6_what_holds(m: int, spread: float) -> None:
    """A ridge bounds the inverse by 1 / ridge, and the normalisation never makes it larger: every
    entry of D is at least 1, and m where tokens agree."""
    ridge = 0.01
    a = kernel_matrices(m, spread, count=1)[0]
    inverse, degrees = pinv(a, ridge=ridge), a.sum(-1)
    root = degrees.rsqrt()
    norm = torch.linalg.matrix_norm(inverse, 2)
    normalized = torch.linalg.matrix_norm(root[:, None] * inverse * root, 2)
    assert degrees.min() >= 1
    assert norm <= 1 / ridge + 1e-6
    assert normalized <= norm / degrees.min() + 1e-9
