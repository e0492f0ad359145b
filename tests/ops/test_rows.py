"""Attention whose rows are divided by their sums: with an inverse, and without one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softmaxfree import gaussian_attention, softmax_free_attention
from softmaxfree.ops import reference

from ..helpers import relative_error, tokens

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
MIDDLE = pytest.mark.parametrize("middle", ["inverse", "sums"])
SELF_OR_CROSS = pytest.mark.parametrize("keys", [None, 50], ids=["self", "cross"])


def inputs(n: int = 37, keys: int | None = None, m: int = 7, d: int = 5, e: int = 6) -> Arguments:
    """Queries, keys, values, landmarks among the queries, logarithms of the weights of keys."""
    q = tokens(2, 2, n, d)
    k = q if keys is None else tokens(2, 2, keys, d, seed=1)
    count = k.shape[-2]
    landmarks = q[..., :m, :] + 0.1 * tokens(2, 2, m, d, seed=3)
    return q, k, tokens(2, 2, count, e, seed=2), landmarks, tokens(2, 2, count, 1, seed=4)[..., 0]


def attend(*given: Tensor, middle: str, **options: Any) -> Tensor:
    q, k, v, landmarks, weights = given
    return softmax_free_attention(
        q, k, v, landmarks, False, middle=middle, rows=True, log_weights=weights, **options
    )


def expected(*given: Tensor, middle: str, **options: Any) -> Tensor:
    q, k, v, landmarks, weights = given
    return reference.softmax_free_attention(
        q, k, v, landmarks, False, middle=middle, rows=True, log_weights=weights, **options
    )


@MIDDLE
@SELF_OR_CROSS
@pytest.mark.parametrize("e", [2, 6, 9])
def test_matches_the_reference(keys: int | None, e: int, middle: str) -> None:
    given = inputs(keys=keys, e=e)
    want = expected(*given, middle=middle)
    assert relative_error(attend(*given, middle=middle), want) < 1e-11
    single = [x.float() for x in given]
    single[1] = single[0] if keys is None else single[1]
    assert relative_error(attend(*single, middle=middle), want) < 1e-4


@MIDDLE
@SELF_OR_CROSS
def test_gradients_match_the_references(keys: int | None, middle: str) -> None:
    given = inputs(keys=keys)
    leaves = [x.requires_grad_() for x in dict.fromkeys(given)]
    got, want = attend(*given, middle=middle), expected(*given, middle=middle)
    cotangent = torch.randn_like(got)
    ours, theirs = (torch.autograd.grad(out, leaves, cotangent) for out in (got, want))
    for one, other in zip(ours, theirs):
        assert relative_error(one, other) < 1e-9


@MIDDLE
def test_gradcheck(middle: str) -> None:
    given = [x.detach().requires_grad_() for x in inputs(n=5, keys=6, m=3, d=2, e=2)]
    assert torch.autograd.gradcheck(lambda *x: attend(*x, middle=middle), given)


@MIDDLE
def test_equal_values_stay_as_they_are(middle: str) -> None:
    """Rows sum to one: with a ridge too, as it changes S v and S 1 alike."""
    q, k, v, landmarks, weights = inputs(keys=50)
    equal = v[..., :1, :].expand_as(v)
    out = attend(q, k, equal, landmarks, weights, middle=middle)
    assert relative_error(out, equal[..., :1, :].expand_as(out)) < 1e-12


def test_without_an_inverse_results_are_averages_of_values() -> None:
    q, k, v, landmarks, weights = inputs(keys=50)
    out = attend(10 * q, 10 * k, v, 10 * landmarks, weights, middle="sums")
    assert (out <= v.amax(-2, keepdim=True) + 1e-12).all()
    assert (out >= v.amin(-2, keepdim=True) - 1e-12).all()


def test_rows_whose_sums_are_not_positive_stay_bounded() -> None:
    """A query far from all landmarks has similarities that may sum to 0 or less."""
    q, k, v, landmarks, weights = inputs(keys=50, m=20)
    far = torch.cat([q, q + 30], -2)
    out = attend(far, k, v, landmarks, weights, middle="inverse")
    assert out.isfinite().all()
    sums = softmax_free_attention(far, k, weights.exp().unsqueeze(-1), landmarks, False)
    assert (sums < 1e-3).any(), "no row of the test is of this kind"
    assert relative_error(out, expected(far, k, v, landmarks, weights, middle="inverse")) < 1e-9
    assert out[..., -37:, :].abs().max() < 1e-3


def test_a_heavy_key_is_all_that_is_attended_to() -> None:
    q, k, v, landmarks, weights = inputs(keys=50)
    weights = weights.index_fill(-1, torch.tensor([7]), 60.0)
    out = attend(q, k, v, landmarks, weights, middle="sums")
    assert relative_error(out, v[..., 7:8, :].expand_as(out)) < 1e-6


def test_the_softmax_of_these_weights_is_softmax_attention() -> None:
    """With w = exp(|k|^2 / 2 sqrt d) the exact kernel, divided by row sums, is a softmax."""
    q, k, v, _, _ = inputs(keys=50)
    weights = (k.square().sum(-1) / (2 * k.shape[-1] ** 0.5)).exp().unsqueeze(-1)
    out = gaussian_attention(q, k, torch.cat([weights * v, weights], -1))
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert relative_error(out[..., :-1] / out[..., -1:], softmax) < 1e-12


@MIDDLE
@given(drop=st.integers(0, 36), junk=st.sampled_from([0.0, 1e6, float("nan"), float("inf")]))
@settings(max_examples=20, deadline=None)
def test_what_is_dropped_changes_nothing(middle: str, drop: int, junk: float) -> None:
    q, k, v, landmarks, weights = inputs(keys=37)
    kept = torch.arange(37) != drop
    want = attend(
        q, k[..., kept, :], v[..., kept, :], landmarks[..., 1:, :], weights[..., kept],
        middle=middle,
    )  # fmt: skip
    k, v, weights = (x.clone() for x in (k, v, weights))
    k[..., drop, :], v[..., drop, :], weights[..., drop] = junk, junk, junk
    landmarks = torch.cat([torch.full_like(landmarks[..., :1, :], junk), landmarks[..., 1:, :]], -2)
    leaves = [x.requires_grad_() for x in (q, k, v, landmarks, weights)]
    got = attend(*leaves, middle=middle, mask=kept, landmark_mask=torch.arange(7) > 0)
    assert relative_error(got, want) < 1e-9
    got.square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert not k.grad[..., drop, :].any()


@MIDDLE
def test_nothing_to_attend_to_gives_zero(middle: str) -> None:
    given = [x.requires_grad_() for x in inputs(keys=50)]
    out = attend(*given, middle=middle, mask=torch.zeros(50, dtype=torch.bool))
    assert not out.any()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in given)


@given(
    magnitude=st.sampled_from([1e-6, 1.0, 1e2, 1e4, 1e8, 1e19, 1e30]),
    offset=st.sampled_from([0.0, 1e3, 1e6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_tokens_of_any_magnitude(magnitude: float, offset: float, dtype: torch.dtype) -> None:
    """Against float64. Where the nearest landmark is a matter of rounding, only finite."""
    q, k, v, landmarks, weights = (x.to(dtype) for x in inputs(keys=50))
    q, k, landmarks = (x * magnitude + offset for x in (q, k, landmarks))
    given = [x.detach().requires_grad_() for x in (q, k, v, landmarks, weights)]
    out = attend(*given, middle="sums")
    assert out.dtype == dtype
    assert out.isfinite().all()
    out.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in given)
    want = attend(*(x.detach().double() for x in given), middle="sums")
    assert relative_error(out.double(), want) < (1e-2 if dtype == torch.float32 else 2e-2)


@MIDDLE
def test_a_sample_does_not_depend_on_its_batch_mates(middle: str) -> None:
    given = [x.float() for x in inputs(keys=50)]
    alone = attend(*(x[:1] for x in given), middle=middle)
    given[0][1] *= 1e8
    given[3][1] *= 1e8
    assert relative_error(attend(*given, middle=middle)[:1], alone) < 1e-5


@MIDDLE
def test_leading_axes_are_broadcast(middle: str) -> None:
    q, k, v, landmarks, weights = inputs(keys=50)
    got = attend(q, k[:1], v[:, :1], landmarks[:1], weights[:1], middle=middle)
    shapes = [x.expand(2, 2, *x.shape[2:]) for x in (k[:1], v[:, :1], landmarks[:1], weights[:1])]
    assert relative_error(got, attend(q, *shapes, middle=middle)) < 1e-12
    single = (x[0, 0] for x in inputs(keys=50))
    assert attend(*single, middle=middle).shape == (37, 6)


@MIDDLE
def test_autocast_keeps_float32(middle: str) -> None:
    given = [x.float() for x in inputs(keys=50)]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(*given, middle=middle), attend(*given, middle=middle).float())
        lowered = attend(*given, middle=middle)
    assert relative_error(lowered, attend(*given, middle=middle)) < 1e-6


def test_bad_input_is_named() -> None:
    q, k, v, landmarks, weights = inputs()
    with pytest.raises(ValueError, match="middle must be one of inverse, sums, got 'sum'"):
        softmax_free_attention(q, k, v, landmarks, middle="sum")
    with pytest.raises(ValueError, match="nothing is inverted: leave inverse, iters and ridge out"):
        softmax_free_attention(q, k, v, landmarks, middle="sums", ridge=0.1)
    with pytest.raises(ValueError, match=r"rows are not divided by their sums; pass rows=True"):
        softmax_free_attention(q, k, v, landmarks, log_weights=weights)
    with pytest.raises(ValueError, match=r"log_weights must be \(2, 2, 37\), got \(2, 2, 36\)"):
        softmax_free_attention(q, k, v, landmarks, rows=True, log_weights=weights[..., 1:])
