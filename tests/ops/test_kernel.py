"""The Gaussian kernel: against the reference, and where rounding hurts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softmaxfree import gaussian_kernel
from softmaxfree.ops import reference

from ..helpers import relative_error, tokens


@pytest.mark.parametrize("shapes", [((5, 3), (4, 3)), ((2, 1, 7, 8), (3, 2, 8)), ((1, 1), (1, 1))])
def test_matches_the_reference(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q, k = tokens(*shapes[0]), tokens(*shapes[1], seed=1)
    expected = reference.gaussian_kernel(q, k)
    assert torch.allclose(gaussian_kernel(q, k), expected, atol=1e-14)
    assert relative_error(gaussian_kernel(q.float(), k.float()), expected) < 1e-6


def test_gradients() -> None:
    q, k = tokens(2, 5, 3).requires_grad_(), tokens(1, 4, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(gaussian_kernel, (q, k))
    assert torch.autograd.gradgradcheck(gaussian_kernel, (q, k))
    assert torch.autograd.gradcheck(lambda q: gaussian_kernel(q, q), (q,))
    assert torch.autograd.gradgradcheck(lambda q: gaussian_kernel(q, q), (q,))


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 40),
    d=st.integers(1, 40),
    magnitude=st.sampled_from([0.0, 1e-4, 1.0, 1e2, 1e4, 1e18, 1e30]),
    spread=st.sampled_from([0.0, 1e-6, 1e-2, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_is_a_kernel_matrix_at_any_magnitude(
    n: int, d: int, magnitude: float, spread: float, dtype: torch.dtype
) -> None:
    """The paper's remarks on S: symmetric, within [0, 1], 1 on the diagonal."""
    q = (magnitude * (1 + spread * tokens(n, d))).to(dtype)
    s = gaussian_kernel(q, q)
    assert s.dtype == dtype
    assert torch.equal(s, s.mT)
    assert (s.diagonal() == 1).all()
    assert ((s >= 0) & (s <= 1)).all()


def test_near_duplicates_of_large_tokens_keep_their_distance() -> None:
    """At magnitude 1e3 the expanded square in float32 would lose all of these distances."""
    q = (1000 + tokens(1, 20, 8)).float()
    assert (
        relative_error(gaussian_kernel(q, q), reference.gaussian_kernel(q.double(), q.double()))
        < 1e-6
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_far_token_costs_the_others_no_digits(
    tied: bool, dtype: torch.dtype, tolerance: float
) -> None:
    q = tokens(2, 20, 8)
    q[0, 3] += 1e12
    q[0, 4] = q[0, 3] * (1 + 1e-15)
    q = q.to(dtype)
    wide = q.double().requires_grad_()
    expected = reference.gaussian_kernel(wide, wide)
    got = q.requires_grad_()
    kernel = gaussian_kernel(got, got if tied else got.clone())
    assert relative_error(kernel, expected) < tolerance
    cotangent = tokens(2, 20, 20, seed=1)
    (ours,) = torch.autograd.grad(kernel, got, cotangent.to(dtype))
    (theirs,) = torch.autograd.grad(expected, wide, cotangent)
    assert relative_error(ours, theirs) < 10 * tolerance


def test_bad_input_is_named() -> None:
    q = tokens(2, 5, 3)
    with pytest.raises(ValueError, match=r"k must have q's width 3, got shape \(2, 5, 4\)"):
        gaussian_kernel(q, tokens(2, 5, 4))
    with pytest.raises(ValueError, match=r"q must be \(\.\.\., tokens, width\), got shape \(3,\)"):
        gaussian_kernel(q[0, 0], q)
    with pytest.raises(ValueError, match=r"floating-point type, got torch\.int64"):
        gaussian_kernel(q.long(), q)
    with pytest.raises(ValueError, match=r"q is empty: its shape is \(0, 5, 3\)"):
        gaussian_kernel(q[:0], q)
    with pytest.raises(ValueError, match=r"equal or 1, got q \(2, 5, 3\), k \(3, 5, 3\)"):
        gaussian_kernel(q, tokens(3, 5, 3))
