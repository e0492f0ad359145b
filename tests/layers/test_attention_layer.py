"""The layer: any size, any sampler, masks, class tokens, context."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from softmaxfree import SoftmaxFreeAttention, gaussian_attention, softmax_free_attention
from softmaxfree.layers.samplers import SAMPLERS

from ..helpers import relative_error, tokens

SOFTX = {
    "normalize": False, "rows": True, "key_weights": True, "sampler": "avg",
    "landmark_norm": False, "tie_qk": False,
}  # fmt: skip


def build(**kwargs: object) -> SoftmaxFreeAttention:
    torch.manual_seed(0)
    arguments = {"num_heads": 2, "ratio": 4, **kwargs}
    return SoftmaxFreeAttention(12, **arguments).double().eval()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 6)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


@settings(deadline=None, max_examples=60)
@given(
    size=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    number=st.sampled_from([None, 1, 9, 49]),
    prefix=st.integers(0, 2),
    value_conv=st.sampled_from([None, 3]),
    normalize=st.booleans(),
    norm=st.booleans(),
)
def test_any_image_gives_a_finite_result_and_gradients_everywhere(
    size: tuple[int, int],
    sampler: str,
    number: int | None,
    prefix: int,
    value_conv: int | None,
    normalize: bool,
    norm: bool,
) -> None:
    layer = build(
        sampler=sampler,
        num_landmarks=number,
        prefix_tokens=prefix,
        value_conv=value_conv,
        normalize=normalize,
        landmark_norm=norm,
    )
    x = tokens(2, prefix + size[0] * size[1], 12).requires_grad_()
    out = layer(x, size)
    assert out.shape == x.shape
    out.square().sum().backward()
    for tensor in (out, x.grad, *(p.grad for p in layer.parameters())):
        assert tensor is not None
        assert tensor.isfinite().all()


@pytest.mark.parametrize(("ndim", "sizes"), [(2, [(14, 14), (56, 80)]), (1, [(98,), (3000,)])])
def test_by_default_there_are_49_landmarks_at_every_size(
    ndim: int, sizes: list[tuple[int, ...]]
) -> None:
    """So the cost is linear in the number of tokens."""
    for name in SAMPLERS:
        layer = SoftmaxFreeAttention(12, 2, ndim=ndim, sampler=name).eval()
        for size in sizes:
            queries = torch.randn(1, 2, math.prod(size), 6)
            assert layer.sample(queries, size, None)[0].shape == (1, 2, 49, 6)


def test_the_number_of_landmarks_is_that_of_the_windows_of_a_ratio() -> None:
    queries = torch.randn(1, 2, 24 * 16, 6)
    for arguments, expected in (
        ({"ratio": 4}, 24),
        ({"num_landmarks": 9}, 9),
        ({"ratio": 4, "num_landmarks": 9}, 9),
    ):
        layer = SoftmaxFreeAttention(12, 2, **arguments).eval()
        assert layer.sample(queries, (24, 16), None)[0].shape[2] == expected


def test_is_the_operation_between_its_projections() -> None:
    layer = build(sampler="avg", landmark_norm=False)
    x = tokens(2, 64, 12)
    q, v = heads(layer.q(x)), heads(layer.v(x))
    landmarks = q.unflatten(2, (2, 4, 2, 4)).mean((3, 5)).flatten(2, 3)
    expected = layer.proj(merged(softmax_free_attention(q, q, v, landmarks)))
    assert relative_error(layer(x, (8, 8)), expected) < 1e-12


def test_a_ratio_of_1_without_norm_is_exact_attention() -> None:
    """The class token included: all tokens are landmarks then."""
    layer = build(
        sampler="avg", ratio=1, landmark_norm=False, prefix_tokens=1, normalize=False,
        inverse="exact",
    )  # fmt: skip
    x = tokens(2, 10, 12)
    q, v = heads(layer.q(x)), heads(layer.v(x))
    expected = layer.proj(merged(gaussian_attention(q, q, v)))
    assert relative_error(layer(x, (3, 3)), expected) < 1e-8


def test_a_kernel_for_each_channel() -> None:
    """Heads whose channels have one kernel are those of the usual value convolution."""
    usual, wide = build(value_conv=3), build(value_conv=3, value_conv_per_channel=True)
    assert usual.value_conv is not None
    assert wide.value_conv is not None
    assert wide.value_conv.weight.shape == (12, 1, 3, 3)
    copied = usual.state_dict()
    per_head = 12 // len(usual.value_conv.weight)
    copied["value_conv.weight"] = copied["value_conv.weight"].repeat_interleave(per_head, 0)
    wide.load_state_dict(copied)
    x = tokens(2, 64, 12)
    assert relative_error(wide(x, (8, 8)), usual(x, (8, 8))) < 1e-12
    with torch.no_grad():
        wide.value_conv.weight[0] += 1
    assert relative_error(wide(x, (8, 8)), usual(x, (8, 8))) > 1e-3


def test_a_gate_scales_the_result_before_the_last_projection() -> None:
    gated, plain = build(gate=True), build()
    plain.load_state_dict({k: v for k, v in gated.state_dict().items() if "gate" not in k})
    plain.proj = nn.Identity()
    assert gated.gate is not None
    x = tokens(2, 64, 12)
    expected = gated.proj(plain(x, (8, 8)) * torch.sigmoid(gated.gate(x)))
    assert relative_error(gated(x, (8, 8)), expected) < 1e-12


def test_the_value_convolution_is_added_to_the_grid_alone() -> None:
    with_conv, without = build(value_conv=3, prefix_tokens=1), build(prefix_tokens=1)
    without.load_state_dict(with_conv.state_dict(), strict=False)
    x = tokens(2, 1 + 30, 12)
    image = heads(with_conv.v(x))[:, :, 1:].unflatten(2, (5, 6))  # (B, heads, H, W, d)
    local = torch.stack(
        [
            torch.stack(
                [
                    F.conv2d(image[:, h, :, :, c].unsqueeze(1), kernel[None], padding=1).flatten(1)
                    for c in range(6)
                ],
                -1,
            )
            for h, kernel in enumerate(with_conv.value_conv.weight)
        ],
        1,
    )  # (B, heads, N, d)
    difference = with_conv(x, (5, 6)) - without(x, (5, 6))
    expected = F.pad(merged(local), (0, 0, 1, 0)) @ with_conv.proj.weight.T
    assert relative_error(difference, expected) < 1e-12


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("number", [None, 4])
@pytest.mark.parametrize("value_conv", [None, 3])
def test_padding_a_sequence_changes_nothing(
    sampler: str, number: int | None, value_conv: int | None
) -> None:
    options = {"num_landmarks": number, "value_conv": value_conv, "prefix_tokens": 1}
    layer = build(ndim=1, sampler=sampler, **options)
    x = tokens(2, 1 + 13, 12)
    expected = layer(x)
    padded = torch.cat([x, x.new_full((2, 9, 12), torch.nan)], 1)
    mask = (torch.arange(23) < 14).expand(2, -1)
    got = layer(padded, mask=mask)
    assert relative_error(got[:, :14], expected) < 1e-12


def test_padding_an_image_changes_nothing() -> None:
    for number in (None, 9):
        for sampler in ("conv", "avg"):
            layer = build(sampler=sampler, num_landmarks=number, value_conv=3)
            x = tokens(2, 9 * 7, 12)
            canvas, mask = torch.full((2, 16, 10, 12), 7.0).double(), torch.zeros(2, 16, 10)
            canvas[:, :9, :7], mask[:, :9, :7] = x.unflatten(1, (9, 7)), 1
            got = layer(canvas.flatten(1, 2), (16, 10), mask=mask.flatten(1).bool())
            got = got.unflatten(1, (16, 10))[:, :9, :7].flatten(1, 2)
            assert relative_error(got, layer(x, (9, 7))) < 1e-12


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_cross_attention_samples_both_sides(sampler: str) -> None:
    layer = build(sampler=sampler, landmark_norm=False, num_landmarks=4)
    x, context = tokens(2, 8 * 8, 12), tokens(2, 6 * 5, 12, seed=1)
    q, k, v = heads(layer.q(x)), heads(layer.q(context)), heads(layer.v(context))
    landmarks = torch.cat(
        [layer.sampler(q, (8, 8), None)[0], layer.sampler(k, (6, 5), None)[0]], -2
    )
    expected = layer.proj(merged(softmax_free_attention(q, k, v, landmarks)))
    assert relative_error(layer(x, (8, 8), context, (6, 5)), expected) < 1e-12

    padded = torch.cat([context, torch.full((2, 10, 12), torch.nan)], 1)
    mask = torch.arange(40) < 30
    got = layer(x, (8, 8), padded, (8, 5), mask.expand(2, -1))
    assert relative_error(got, expected) < 1e-12


def test_a_sample_does_not_depend_on_its_batch_mates() -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        layer = build(value_conv=3, num_landmarks=9).to(dtype)
        x = tokens(4, 16 * 16, 12, dtype=dtype)
        x[1], x[2] = 1.0, x[2] * 1e3
        together = layer(x, (16, 16))
        for i in (0, 3):
            assert relative_error(together[i], layer(x[i : i + 1], (16, 16))[0]) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    layer = build(value_conv=3).float()
    x = tokens(2, 12 * 12, 12, dtype=torch.float32)
    expected = layer(x, (12, 12))
    with torch.autocast("cpu", dtype):
        got = layer(x, (12, 12))
    assert got.dtype == dtype
    assert relative_error(got, expected) < 3e-2
    got = layer.to(dtype)(x.to(dtype), (12, 12))
    assert got.dtype == dtype
    assert relative_error(got, expected) < 5e-2


@pytest.mark.parametrize("of", ["queries", "keys", "both", None])
@pytest.mark.parametrize("middle", ["inverse", "sums"])
def test_softx_is_the_operation_between_its_projections(middle: str, of: str | None) -> None:
    layer = build(**SOFTX, middle=middle, landmarks_of=of)
    assert layer.key_weights is not None
    nn.init.normal_(layer.key_weights)
    x = tokens(2, 64, 12)
    q, k, v = (heads(projection(x)) for projection in (layer.q, layer.k, layer.v))
    samples = {
        name: tokens.unflatten(2, (2, 4, 2, 4)).mean((3, 5)).flatten(2, 3)
        for name, tokens in (("queries", q), ("keys", k))
    }
    samples["both"] = torch.cat([samples["queries"], samples["keys"]], -2)
    expected = softmax_free_attention(
        q, k, v, samples[of or ("queries" if middle == "sums" else "both")], False, rows=True,
        middle=middle, log_weights=torch.einsum("bhnd,hd->bhn", k, layer.key_weights),
    )  # fmt: skip
    assert relative_error(layer(x, (8, 8)), layer.proj(merged(expected))) < 1e-12


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"num_landmarks": 9, "value_conv": 3, "prefix_tokens": 1}, SOFTX | {"middle": "sums"}],
    ids=str,
)
def test_compiles_without_breaks(kwargs: dict[str, object]) -> None:
    layer = build(**kwargs).train()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = tokens(2, layer.prefix_tokens + 9 * 6, 12).requires_grad_()
    got, expected = compiled(x, (9, 6)), layer(x, (9, 6))
    assert relative_error(got, expected) < 1e-10
    cotangent = torch.randn_like(expected)
    (ours,) = torch.autograd.grad(got, x, cotangent)
    (theirs,) = torch.autograd.grad(expected, x, cotangent)
    assert relative_error(ours, theirs) < 1e-9


def test_saves_and_loads() -> None:
    layer, other = build(value_conv=3), build(value_conv=3)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    other.load_state_dict(layer.state_dict())
    x = tokens(1, 30, 12)
    assert torch.equal(layer(x, (5, 6)), other(x, (5, 6)))
    assert set(layer.state_dict()) == {
        "q.weight", "q.bias", "v.weight", "v.bias", "proj.weight", "proj.bias",
        "sampler.weight", "landmark_norm.0.weight", "landmark_norm.0.bias", "value_conv.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_heads": 5}, "num_heads must divide dim, got dim=12, num_heads=5"),
        ({"sampler": "max"}, "unknown sampler 'max'; choose one of conv, avg, random, biased"),
        ({"inverse": "svd"}, "unknown method 'svd'"),
        ({"value_conv": 4}, "value_conv must be an odd size or None, got 4"),
        ({"prefix_tokens": -1}, "prefix_tokens must be 0 or more, got -1"),
        ({"key_weights": True}, "key_weights need rows that are divided by their sums: add rows"),
        ({"middle": "sum"}, "middle must be one of inverse, sums, got 'sum'"),
        ({"middle": "sums", "inverse": "newton"}, "with middle='sums' nothing is inverted: leave"),
        ({"landmarks_of": "all"}, "landmarks_of must be one of queries, keys, both, got 'all'"),
        ({"causal": True}, "would leak the future into every output"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**kwargs)


def test_bad_input_is_named() -> None:
    layer, line, x = build(prefix_tokens=1), build(ndim=1), tokens(2, 31, 12)
    with pytest.raises(
        ValueError,
        match=r"size=\(4, 7\) makes 28 tokens, but x of shape \(2, 31, 12\) has 30 after 1 prefix",
    ):
        layer(x, (4, 7))
    with pytest.raises(ValueError, match=r"for images: pass size=\(H, W\) beside x of 30 tokens"):
        layer(x)
    with pytest.raises(ValueError, match=r"size must be \(H, W\) for ndim=2, got \(30,\)"):
        layer(x, (30,))
    with pytest.raises(ValueError, match=r"size must be \(N,\) for ndim=1, got \(5, 6\)"):
        line(x[:, :30], (5, 6))
    with pytest.raises(ValueError, match=r"x must be \(B, N, 12\), got shape \(2, 31, 8\)"):
        layer(x[..., :8], (5, 6))
    with pytest.raises(ValueError, match=r"x must be \(B, N, 12\), got shape \(31, 12\)"):
        layer(x[0], (5, 6))
    with pytest.raises(ValueError, match="x is empty"):
        layer(x[:0], (5, 6))
    with pytest.raises(ValueError, match="x has no tokens after 1 prefix tokens"):
        layer(x[:, :1], (1, 1))
    with pytest.raises(ValueError, match=r"floating-point type, got torch\.int64"):
        layer(x.long(), (5, 6))
    with pytest.raises(
        ValueError, match=r"context must have x's batch of 2, got shape \(1, 31, 12\)"
    ):
        layer(x, (5, 6), x[:1], (5, 6))
    with pytest.raises(ValueError, match="context_size is given without a context"):
        layer(x, (5, 6), context_size=(5, 6))
    with pytest.raises(ValueError, match=r"pass context_size=\(H, W\) beside context of 30"):
        layer(x, (5, 6), x)
    with pytest.raises(ValueError, match="causal one among them, cannot be kept"):
        line(x, mask=torch.ones(31, 31).tril().bool())
    with pytest.raises(ValueError, match="queries and values on one grid"):
        build(value_conv=3)(x[:, :30], (5, 6), x[:, :30], (5, 6))
