"""Attention through landmarks, and exact attention, against the references."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from softmaxfree import gaussian_attention, softmax_free_attention
from softmaxfree.ops import reference
from softmaxfree.ops.backends import tiles
from softmaxfree.ops.inverse import INVERSES

from ..helpers import relative_error, tokens

NORMALIZE = pytest.mark.parametrize("normalize", [True, False], ids=["soft++", "soft"])


def inputs(
    n: int = 37, keys: int | None = None, m: int = 7, d: int = 5, e: int = 6, b: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = tokens(b, 2, n, d)
    k = q if keys is None else tokens(b, 2, keys, d, seed=1)
    return q, k, tokens(b, 2, k.shape[-2], e, seed=2), tokens(b, 2, m, d, seed=3)


@NORMALIZE
@pytest.mark.parametrize("keys", [None, 11, 80], ids=["self", "fewer-keys", "more-keys"])
@pytest.mark.parametrize("tile_bytes", [2**20, 1], ids=["one-tile", "many-tiles"])
@pytest.mark.parametrize("n", [1, 5, 200])
def test_matches_the_reference(
    n: int, keys: int | None, tile_bytes: int, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_TILE_BYTES", tile_bytes)
    arguments = inputs(n, keys, m=9)
    expected = reference.softmax_free_attention(*arguments, normalize)
    assert relative_error(softmax_free_attention(*arguments, normalize), expected) < 1e-12
    got = softmax_free_attention(
        *[x.float() for x in (arguments[0], arguments[1])] if keys else [arguments[0].float()] * 2,
        *[x.float() for x in arguments[2:]],
        normalize,
    )
    assert relative_error(got, expected) < 1e-4


def assert_gradients_match(
    arguments: tuple[Tensor, ...], normalize: bool, tolerance: float
) -> None:
    leaves = [x.requires_grad_() for x in dict.fromkeys(arguments)]
    got = softmax_free_attention(*arguments, normalize)
    expected = reference.softmax_free_attention(*arguments, normalize)
    cotangent = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, cotangent),
        torch.autograd.grad(expected, leaves, cotangent),
    ):
        assert relative_error(ours, theirs) < tolerance


@NORMALIZE
@pytest.mark.parametrize("keys", [None, 70], ids=["self", "cross"])
@pytest.mark.parametrize("tile_bytes", [2**20, 1], ids=["one-tile", "many-tiles"])
def test_gradients_match_the_references(
    keys: int | None, tile_bytes: int, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_TILE_BYTES", tile_bytes)
    arguments = inputs(130, keys)
    assert_gradients_match(arguments, normalize, 1e-9)


def gradient(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    q = q.detach().requires_grad_()
    softmax_free_attention(q, q, v, landmarks).square().sum().backward()
    return q.grad


def test_the_number_of_threads_may_change_before_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It decides on the tiles, in which the kernel's values are kept."""
    monkeypatch.setattr(tiles, "_TILE_BYTES", 2**16)
    q, _, v, landmarks = inputs(300, m=100)
    expected = gradient(q, v, landmarks)
    threads = torch.get_num_threads()
    q.requires_grad_()
    loss = softmax_free_attention(q, q, v, landmarks).square().sum()
    try:
        torch.set_num_threads(threads + 3)
        loss.backward()
    finally:
        torch.set_num_threads(threads)
    assert relative_error(q.grad, expected) < 1e-12


def test_threads_share_no_memory() -> None:
    cases = [
        (tokens(1, 1, 400, 16, seed=i), tokens(1, 1, 400, 16, seed=50 + i), tokens(1, 1, 40, 16))
        for i in range(16)
    ]
    expected = [gradient(*case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for got, alone in zip(pool.map(lambda case: gradient(*case), cases * 4), expected * 4):
            assert relative_error(got, alone) < 1e-12


def test_training_follows_inference_mode() -> None:
    q, _, v, landmarks = inputs(64)
    with torch.inference_mode():
        out = softmax_free_attention(q, q, v, landmarks)
    assert relative_error(out, reference.softmax_free_attention(q, q, v, landmarks)) < 1e-12
    assert gradient(q, v, landmarks).isfinite().all()


def test_shapes_without_data() -> None:
    """On the meta device, and for fake tensors, which leave no trace in later results."""
    q, _, v, landmarks = inputs(64)
    out = softmax_free_attention(*(x.to("meta") for x in (q, q, v, landmarks)))
    assert out.shape == v.shape
    with FakeTensorMode() as mode:
        fake_q, fake_v, fake_landmarks = (mode.from_tensor(x) for x in (q, v, landmarks))
        assert softmax_free_attention(fake_q, fake_q, fake_v, fake_landmarks).shape == v.shape
    assert softmax_free_attention(q, q, v, landmarks).isfinite().all()


@NORMALIZE
@pytest.mark.parametrize("keys", [None, 3], ids=["self", "cross"])
def test_gradcheck_and_gradgradcheck(keys: int | None, normalize: bool) -> None:
    leaves = [x[:1, :1].requires_grad_() for x in dict.fromkeys(inputs(4, keys, 3, 2, 2))]

    def attention(q: Tensor, *others: Tensor) -> Tensor:
        others = others if keys else (q, *others)
        return softmax_free_attention(q, *others, normalize)

    assert torch.autograd.gradcheck(attention, leaves)
    assert torch.autograd.gradgradcheck(attention, leaves)


@NORMALIZE
@pytest.mark.parametrize("keys", [None, 9], ids=["self", "cross"])
def test_exact_attention_matches_the_reference(keys: int | None, normalize: bool) -> None:
    q, k, v, _ = inputs(12, keys)
    mask = torch.rand(2, 1, k.shape[-2]) > 0.3
    mask[..., 0] = True
    for kept in (None, mask):
        got = gaussian_attention(q, k, v, normalize, kept)
        assert relative_error(got, reference.gaussian_attention(q, k, v, normalize, kept)) < 1e-12
    q.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q: gaussian_attention(q, q if keys is None else k, v, normalize), (q,)
    )


@NORMALIZE
@pytest.mark.parametrize("junk", [1e6, torch.nan])
@pytest.mark.parametrize("tied", [True, False])
def test_padding_changes_nothing_of_exact_attention(
    tied: bool, junk: float, normalize: bool
) -> None:
    """Of neither results nor gradients, to the digits of float32."""
    q, k, v, _ = (x.float() for x in inputs(20, None if tied else 20))
    mask = torch.arange(30) % 3 > 0
    kept = mask.nonzero().squeeze(-1)
    cotangent = tokens(*v.shape, seed=4).float()

    def results(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in ((q, v) if tied else (q, k, v))]
        out = gaussian_attention(q, q if tied else k, v, normalize, *masks)
        out = out[..., kept, :] if masks else out
        gradients = torch.autograd.grad(out, leaves, cotangent)
        return [out, *(x[..., kept, :] if masks else x for x in gradients)]

    def padded(x: Tensor) -> Tensor:
        full = x.new_full((*x.shape[:-2], 30, x.shape[-1]), junk)
        full[..., kept, :] = x
        return full

    masks = (mask,) if tied else (mask, mask)
    got = results(padded(q), padded(k), padded(v), *masks)
    for one, other in zip(got, results(q, k, v)):
        assert relative_error(one, other) < 5e-7


def test_masks_of_exact_attention_are_checked() -> None:
    q, k, v, _ = inputs(12, 9)
    with pytest.raises(ValueError, match="query_mask"):
        gaussian_attention(q, k, v, True, query_mask=torch.ones(9, dtype=torch.bool))


@NORMALIZE
def test_all_tokens_as_landmarks_are_exact(normalize: bool) -> None:
    """A A^+ A = A: SOFT is then exact Gaussian attention. SOFT++ is D^-1/2 S D^-1/2 where all
    row sums are equal, as for tokens on a circle."""
    if normalize:
        angle = torch.arange(8) * (2 * torch.pi / 8)
        q = 2 * torch.stack([angle.cos(), angle.sin()], -1).double()
    else:
        q = 2 * tokens(3, 8, 4)
    v = tokens(*q.shape, seed=1)
    got = softmax_free_attention(q, q, v, q, normalize, method="exact")
    assert relative_error(got, gaussian_attention(q, q, v, normalize)) < 1e-9


@NORMALIZE
@settings(deadline=None, max_examples=25)
@given(
    padding=st.integers(0, 70), drop=st.integers(0, 5), junk=st.sampled_from([0.0, 1e9, torch.nan])
)
def test_padding_changes_nothing(normalize: bool, padding: int, drop: int, junk: float) -> None:
    q, _, v, landmarks = inputs(30)
    expected = softmax_free_attention(q, q, v, landmarks, normalize)

    def padded(x: Tensor, count: int) -> Tensor:
        return torch.cat([x, x.new_full((*x.shape[:-2], count, x.shape[-1]), junk)], -2)

    mask = torch.arange(30 + padding) < 30
    landmark_mask = torch.arange(landmarks.shape[-2] + drop) < landmarks.shape[-2]
    more = padded(q, padding)
    arguments = (padded(v, padding), padded(landmarks, drop), normalize)
    got = softmax_free_attention(more, more, *arguments, mask=mask, landmark_mask=landmark_mask)
    assert relative_error(got[..., :30, :], expected) < 1e-12
    assert got.isfinite().all()
    got = softmax_free_attention(q, more, *arguments, mask=mask, landmark_mask=landmark_mask)
    assert relative_error(got, expected) < 1e-12


def test_masks_match_the_reference_and_stop_gradients() -> None:
    q, k, v, landmarks = inputs(20, 15, m=6)
    mask = (torch.rand(2, 1, 15) > 0.4).expand(2, 2, 15)
    landmark_mask = torch.rand(2, 2, 6) > 0.4
    k.requires_grad_()
    got = softmax_free_attention(q, k, v, landmarks, mask=mask, landmark_mask=landmark_mask)
    expected = reference.softmax_free_attention(
        q, k, v, landmarks, mask=mask, landmark_mask=landmark_mask
    )
    assert relative_error(got, expected) < 1e-12
    (gradient,) = torch.autograd.grad(got.sum(), k)
    assert (gradient[~mask] == 0).all()


@NORMALIZE
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), cross=st.booleans())
def test_permutations(seed: int, cross: bool, normalize: bool) -> None:
    """Outputs follow the queries; the order of keys and of landmarks does not matter."""
    q, k, v, landmarks = inputs(21, 13 if cross else None)
    expected = softmax_free_attention(q, k, v, landmarks, normalize)
    generator = torch.Generator().manual_seed(seed)
    order, key_order, landmark_order = (
        torch.randperm(x.shape[-2], generator=generator) for x in (q, k, landmarks)
    )
    got = softmax_free_attention(
        q[..., order, :],
        k[..., key_order, :],
        v[..., key_order, :],
        landmarks[..., landmark_order, :],
        normalize,
    )
    assert relative_error(got, expected[..., order, :]) < 1e-11


@NORMALIZE
@pytest.mark.parametrize("method", sorted(INVERSES))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_sample_does_not_depend_on_its_batch_mates(
    dtype: torch.dtype, tolerance: float, method: str, normalize: bool
) -> None:
    """A constant image is among the mates, and one far from the rest."""
    q, v = tokens(5, 2, 98, 16, dtype=dtype), tokens(5, 2, 98, 16, seed=1, dtype=dtype)
    q[1] = 0.5
    q[2] *= 1e3
    landmarks = q[:, :, ::2]
    together = softmax_free_attention(q, q, v, landmarks, normalize, method)
    for i in (0, 3, 4):
        alone = softmax_free_attention(
            q[i : i + 1], q[i : i + 1], v[i : i + 1], landmarks[i : i + 1], normalize, method
        )
        assert relative_error(together[i], alone[0]) < tolerance


@settings(deadline=None, max_examples=80)
@given(
    kind=st.sampled_from(["zeros", "constant", "near-duplicates", "random"]),
    magnitude=st.sampled_from([1e-4, 1.0, 1e2, 1e4, 1e18, 3e38]),
    n=st.sampled_from([1, 2, 50]),
    m=st.sampled_from([1, 3, 60]),
    normalize=st.booleans(),
    method=st.sampled_from(sorted(INVERSES)),
)
def test_finite_for_every_finite_input(
    kind: str, magnitude: float, n: int, m: int, normalize: bool, method: str
) -> None:
    noise = {"zeros": 0.0, "constant": 0.0, "near-duplicates": 1e-6, "random": 1.0}[kind]
    level = 0.0 if kind in ("zeros", "random") else 1.0
    largest = torch.finfo(torch.float32).max
    q, landmarks = (
        (magnitude * (level + noise * tokens(2, count, 8, seed=count)))
        .clamp(-largest, largest)
        .float()
        .requires_grad_()
        for count in (n, m)
    )
    v = tokens(2, n, 8, seed=2, dtype=torch.float32).requires_grad_()
    out = softmax_free_attention(q, q, v, landmarks, normalize, method)
    assert out.isfinite().all()
    if magnitude <= 1e4:
        for gradient in torch.autograd.grad(out.sum(), (q, v, landmarks)):
            assert gradient.isfinite().all()


def with_far_landmark(times: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, values and landmarks, one of which, a token too, lies far from the others."""
    q, v = tokens(300, 32), tokens(300, 32, seed=1)
    q[7] *= times
    q, v = q.to(dtype), v.to(dtype)
    return q, v, q[::7].clone()


@pytest.mark.parametrize("times", [1e2, 1e4, 1e6, 1e12])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("keys", [None, 50], ids=["self", "cross"])
def test_a_far_landmark_costs_the_others_no_digits(
    keys: int | None, dtype: torch.dtype, tolerance: float, times: float
) -> None:
    """Of neither results nor gradients; its own token finds it, too."""
    q, v, landmarks = with_far_landmark(times, dtype)
    arguments = (q, q if keys is None else q[:keys].clone(), v[:keys], landmarks)

    def results(dtype: torch.dtype, attention: Callable[..., Tensor]) -> list[Tensor]:
        leaves = {x: x.to(dtype).requires_grad_() for x in dict.fromkeys(arguments)}
        out = attention(*(leaves[x] for x in arguments))
        cotangent = tokens(*out.shape, seed=4).to(dtype)
        return [out, *torch.autograd.grad(out, list(leaves.values()), cotangent)]

    expected = results(torch.float64, reference.softmax_free_attention)
    for got, wanted in zip(results(dtype, softmax_free_attention), expected):
        assert relative_error(got, wanted) < tolerance


@pytest.mark.parametrize("spread", [1e2, 1e4, 1e8])
def test_tokens_far_from_each_other_find_themselves(spread: float) -> None:
    q = spread * tokens(2, 60, 16, dtype=torch.float32)
    v = tokens(2, 60, 16, seed=1, dtype=torch.float32)
    got = softmax_free_attention(q, q, v, q[:, ::3])
    wide = q.double()
    expected = reference.softmax_free_attention(wide, wide, v.double(), wide[:, ::3])
    assert relative_error(got, expected) < 1e-5


def test_tokens_close_to_each_other_far_from_zero_keep_their_digits() -> None:
    q = 1e5 + tokens(2, 60, 16, dtype=torch.float32)
    v = tokens(2, 60, 16, seed=1, dtype=torch.float32)
    got = softmax_free_attention(q, q, v, q[:, ::3])
    wide = q.double()
    expected = reference.softmax_free_attention(wide, wide, v.double(), wide[:, ::3])
    assert relative_error(got, expected) < 1e-4


def test_a_far_landmark_of_a_batch_mate_changes_nothing() -> None:
    far, near = with_far_landmark(1e6, torch.float32), with_far_landmark(1.0, torch.float32)
    q, v, landmarks = (torch.stack(pair) for pair in zip(far, near))
    together = softmax_free_attention(q, q, v, landmarks)
    assert relative_error(together[1], softmax_free_attention(near[0], *near[:2], near[2])) < 1e-5


def test_a_compiled_graph_keeps_the_digits_of_a_far_landmark_s_neighbours() -> None:
    """It cannot choose by values: the far landmark's own tokens it compares by the product."""
    q, v, landmarks = with_far_landmark(1e6, torch.float32)
    compiled = torch.compile(softmax_free_attention, fullgraph=True, backend="aot_eager")
    expected = softmax_free_attention(q, q, v, landmarks)
    others = torch.arange(300) != 7
    assert relative_error(compiled(q, q, v, landmarks)[others], expected[others]) < 1e-5


def ill_conditioned(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose landmark matrix has a condition number near 1e4, as `dtype` rounds them."""
    q = 0.16 * tokens(2, 2, 196, 32)
    q[..., 0] += torch.linspace(0, 3, 196)
    v = tokens(2, 2, 196, 32, seed=1)
    q, v = q.to(dtype), v.to(dtype)
    return q, v, q[:, :, ::4]


@NORMALIZE
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_half_precision(
    dtype: torch.dtype, tolerance: float, autocast: bool, normalize: bool
) -> None:
    q, v, landmarks = ill_conditioned(dtype)
    wide = [x.double() for x in (q, v, landmarks)]
    a = reference.gaussian_kernel(wide[2], wide[2])
    condition = torch.linalg.cond(a)
    assert 2e3 < condition.max() < 2e4
    expected = reference.softmax_free_attention(wide[0], wide[0], wide[1], wide[2], normalize)
    q.requires_grad_()
    with torch.autocast("cpu", dtype, enabled=autocast):
        got = softmax_free_attention(q, q, v, landmarks, normalize)
        got.float().sum().backward()
    assert got.dtype == dtype
    assert q.grad.isfinite().all()
    assert relative_error(got, expected) < tolerance


def test_autocast_keeps_float32() -> None:
    q, _, v, landmarks = (x.float() for x in inputs(50, m=20))
    expected = softmax_free_attention(q, q, v, landmarks)
    with torch.autocast("cpu", torch.bfloat16):
        got = softmax_free_attention(q, q, v, landmarks)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


def test_leading_axes_are_broadcast() -> None:
    q, _, v, landmarks = inputs(12)
    shared = landmarks[0, 0]
    expected = softmax_free_attention(q, q, v, shared.expand(2, 2, -1, -1))
    assert relative_error(softmax_free_attention(q, q, v, shared), expected) < 1e-12
    one = softmax_free_attention(q[0, 0], q[0, 0], v[0, 0], shared)
    assert relative_error(one, expected[0, 0]) < 1e-12


def test_vmap_and_grad_of_torch_func() -> None:
    q, _, v, landmarks = inputs(9, m=4)

    def loss(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
        return softmax_free_attention(q, q, v, landmarks).square().sum()

    mapped = torch.func.vmap(
        lambda q, v, landmarks: softmax_free_attention(q, q, v, landmarks), (0, None, 0)
    )(q, v[0], landmarks)
    assert relative_error(mapped, softmax_free_attention(q, q, v[:1], landmarks)) < 1e-12

    gradients = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, v, landmarks)
    leaves = [x.requires_grad_() for x in (q, v, landmarks)]
    for got, expected in zip(gradients, torch.autograd.grad(loss(*leaves), leaves)):
        assert relative_error(got, expected) < 1e-10

    q, v, landmarks = (x[0, 0].detach() for x in (q, v, landmarks))
    hessian = torch.func.jacrev(torch.func.grad(loss))(q, v, landmarks).flatten(2).flatten(0, 1)
    assert relative_error(hessian, hessian.mT) < 1e-10
    bump = 1e-6 * tokens(*q.shape, seed=5)
    change = torch.func.grad(loss)(q + bump, v, landmarks) - torch.func.grad(loss)(q, v, landmarks)
    assert relative_error(hessian @ bump.flatten(), change.flatten()) < 1e-4


@pytest.mark.slow
def test_compiles_without_breaks() -> None:
    """In one graph, with gradients and lengths that vary; test_inverse.py has all methods."""

    def attention(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
        return softmax_free_attention(q, q, v, landmarks)

    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (16, 40):
        leaves = [x.requires_grad_() for x in dict.fromkeys(inputs(n))]
        got, expected = compiled(*leaves), attention(*leaves)
        assert relative_error(got, expected) < 1e-10
        cotangent = torch.randn_like(expected)
        for ours, theirs in zip(
            torch.autograd.grad(got, leaves, cotangent),
            torch.autograd.grad(expected, leaves, cotangent),
        ):
            assert relative_error(ours, theirs) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_graphs_use_products_only(dtype: torch.dtype) -> None:
    """There `auto` is the rescaled iteration, which agrees with the CPU's factorisation."""

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
            return softmax_free_attention(q, q, v, landmarks)

    q, _, v, landmarks = (x.to(dtype) for x in inputs(30, m=12))
    length = torch.export.Dim("length", min=4)
    program = torch.export.export(
        Attention(), (q, v, landmarks), dynamic_shapes=({2: length}, {2: length}, None)
    )
    assert "cholesky" not in program.graph_module.code
    q, _, v, landmarks = (x.to(dtype) for x in inputs(41, m=12))
    expected = softmax_free_attention(q, q, v, landmarks)
    assert relative_error(program.module()(q, v, landmarks), expected) < (
        1e-4 if dtype == torch.float32 else 1e-2
    )


def test_bad_input_is_named() -> None:
    q, k, v, landmarks = inputs(6, 5)
    with pytest.raises(ValueError, match=r"k must have q's width 5, got shape \(2, 2, 5, 4\)"):
        softmax_free_attention(q, k[..., :4], v, landmarks)
    with pytest.raises(ValueError, match=r"v must have as many tokens as k, 5, got shape"):
        softmax_free_attention(q, k, v[..., :3, :], landmarks)
    with pytest.raises(ValueError, match=r"landmarks must have q's width 5"):
        softmax_free_attention(q, k, v, landmarks[..., :1])
    with pytest.raises(ValueError, match="unknown method 'qr'"):
        softmax_free_attention(q, k, v, landmarks, method="qr")
    with pytest.raises(
        ValueError, match=r"mask must be boolean with True = keep, got torch\.int64"
    ):
        softmax_free_attention(q, k, v, landmarks, mask=torch.ones(5).long())
    with pytest.raises(
        ValueError, match=r"mask must be \(\.\.\., 5\) broadcastable to \(2, 2, 5\)"
    ):
        softmax_free_attention(q, k, v, landmarks, mask=torch.ones(6).bool())
    with pytest.raises(ValueError, match=r"mask must be .* got \(3, 1, 5\)"):
        softmax_free_attention(q, k, v, landmarks, mask=torch.ones(3, 1, 5).bool())
    with pytest.raises(ValueError, match="causal one among them, cannot be kept"):
        softmax_free_attention(q, q, q, landmarks, mask=torch.ones(2, 2, 6, 6).tril().bool())
    with pytest.raises(ValueError, match="landmarks is empty"):
        softmax_free_attention(q, k, v, landmarks[..., :0, :])
    with pytest.raises(ValueError, match="q must be a tensor, got list"):
        softmax_free_attention([[1.0]], k, v, landmarks)


@NORMALIZE
@pytest.mark.parametrize("keys", [None, 90], ids=["self", "cross"])
@pytest.mark.parametrize("stored", [2**25, 1], ids=["stored", "computed-twice"])
def test_many_landmarks_are_solved_with_and_not_inverted(
    keys: int | None, stored: int, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_TILE_BYTES", 2**14)
    monkeypatch.setattr(tiles, "_STORED_BYTES", stored)
    monkeypatch.setattr(torch, "cholesky_inverse", None)
    arguments = inputs(200, keys, m=130)
    expected = reference.softmax_free_attention(*arguments, normalize)
    assert relative_error(softmax_free_attention(*arguments, normalize), expected) < 1e-10
    assert_gradients_match(arguments, normalize, 1e-8)


def test_many_landmarks_have_second_derivatives() -> None:
    q, _, v, landmarks = inputs(20, m=129, b=1)

    def slope(landmarks: Tensor) -> Tensor:
        out = softmax_free_attention(q, q, v, landmarks).square().sum()
        return torch.autograd.grad(out, landmarks, create_graph=True)[0].square().sum()

    def numeric(step: float) -> float:
        return ((slope(landmarks + step * way) - slope(landmarks - step * way)) / (2 * step)).item()

    way = tokens(*landmarks.shape, seed=5)
    landmarks.requires_grad_()
    (second,) = torch.autograd.grad(slope(landmarks), landmarks)
    assert (second * way).sum().item() == pytest.approx(numeric(1e-5), rel=1e-5)


def test_many_equal_landmarks_in_float32_give_finite_results() -> None:
    """Where the factorisation of one matrix fails, it gets more ridge; the others do not."""
    q, _, v, landmarks = (x.float() for x in inputs(60, m=600))
    landmarks[0, 1] = landmarks[0, 1, :1]
    out = softmax_free_attention(q, q, v, landmarks, ridge=1e-9, method="cholesky")
    assert out.isfinite().all()
    alone = softmax_free_attention(
        q[1:], q[1:], v[1:], landmarks[1:], ridge=1e-9, method="cholesky"
    )
    assert torch.equal(out[1:], alone)


def test_many_landmarks_can_be_mapped() -> None:
    q, _, v, landmarks = inputs(30, m=131, b=3)
    mapped = torch.func.vmap(lambda q, v, y: softmax_free_attention(q, q, v, y))(q, v, landmarks)
    assert relative_error(mapped, softmax_free_attention(q, q, v, landmarks)) < 1e-10
