"""Landmarks: what each sampler makes of a grid, a line, a mask."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softmaxfree.layers.samplers import SAMPLERS, Size

from ..helpers import relative_error, tokens

SIZES: list[Size] = [(1,), (7,), (16,), (1, 1), (8, 8), (9, 5), (3, 14)]


def grid_of(q: Tensor, size: Size) -> Tensor:
    """(B, heads, N, d) -> (B heads, d, *size), as torch's pooling wants it."""
    return q.flatten(0, 1).transpose(1, 2).unflatten(2, size)


def tokens_of(grid: Tensor, q: Tensor) -> Tensor:
    return grid.flatten(2).transpose(1, 2).unflatten(0, q.shape[:2])


def build(name: str, ndim: int, **kwargs: object) -> torch.nn.Module:
    torch.manual_seed(0)
    arguments = {"ratio": 4, "num_landmarks": None, **kwargs}
    return SAMPLERS[name](6, ndim, **arguments).double().eval()


@pytest.mark.parametrize(
    ("pad", "size"),
    [("replicate", size) for size in SIZES] + [("drop", s) for s in SIZES if min(s) >= 4],
    ids=str,
)
def test_conv_is_torchs_convolution(pad: str, size: Size) -> None:
    sampler = build("conv", len(size), pad=pad)
    q = tokens(2, 3, math.prod(size), 6)
    grid = grid_of(q, size)
    if pad == "replicate":
        grid = F.pad(grid, [x for side in reversed(size) for x in (0, -side % 4)], "replicate")
    conv = F.conv1d if len(size) == 1 else F.conv2d
    expected = tokens_of(conv(grid, sampler.weight, stride=4), q)
    landmarks, mask = sampler(q, size, None)
    assert mask is None
    assert relative_error(landmarks, expected) < 1e-12


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_avg_leaves_padding_out(size: Size) -> None:
    q = tokens(2, 3, math.prod(size), 6)
    pooling = F.avg_pool1d if len(size) == 1 else F.avg_pool2d
    expected = pooling(grid_of(q, size), 4, ceil_mode=True, count_include_pad=False)
    landmarks, _ = build("avg", len(size))(q, size, None)
    assert relative_error(landmarks, tokens_of(expected, q)) < 1e-12


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_number_of_tokens_pools_adaptively(size: Size) -> None:
    q = tokens(2, 3, math.prod(size), 6)
    side = 9 if len(size) == 1 else 3
    bins = [min(side, length) for length in size]
    pooling = F.adaptive_avg_pool1d if len(size) == 1 else F.adaptive_avg_pool2d
    expected = pooling(grid_of(q, size), bins if len(size) == 2 else bins[0])
    landmarks, _ = build("avg", len(size), num_landmarks=9)(q, size, None)
    assert relative_error(landmarks, tokens_of(expected, q)) < 1e-12


def test_a_number_of_tokens_equals_the_ratio_at_the_size_it_stands_for() -> None:
    """7 x 7 tokens of a 28 x 28 map: the ratio 4 model, with the same weights."""
    q = tokens(2, 2, 28 * 28, 6)
    for name in ("conv", "avg"):
        by_ratio, _ = build(name, 2)(q, (28, 28), None)
        by_number, _ = build(name, 2, num_landmarks=49)(q, (28, 28), None)
        assert relative_error(by_number, by_ratio) < 1e-12
        larger, _ = build(name, 2, num_landmarks=49)(tokens(1, 2, 60 * 45, 6), (60, 45), None)
        assert larger.shape == (1, 2, 49, 6)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("size", [(7,), (9, 5)], ids=str)
@pytest.mark.parametrize("number", [None, 9])
def test_how_many_landmarks_there_are(name: str, size: Size, number: int | None) -> None:
    landmarks, _ = build(name, len(size), num_landmarks=number)(
        tokens(2, 3, math.prod(size), 6), size, None
    )
    if number is None:
        expected = math.prod(math.ceil(side / 4) for side in size)
    elif name in ("random", "biased"):
        expected = min(number, math.prod(size))
    else:
        lengths = [math.ceil(side / 4) for side in size] if name == "conv" else size
        expected = math.prod(min(round(number ** (1 / len(size))), side) for side in lengths)
    assert landmarks.shape == (2, 3, expected, 6)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("number", [None, 9])
@pytest.mark.parametrize("pad", ["replicate", "drop"])
@pytest.mark.parametrize(
    ("size", "padded"),
    [((7,), (7,)), ((7,), (21,)), ((9, 5), (12, 5)), ((9, 5), (16, 11))],
    ids=str,
)
def test_padding_changes_nothing(
    name: str, number: int | None, pad: str, size: Size, padded: Size
) -> None:
    """Grids padded to the right and below, their padding masked, whatever it holds."""
    sampler = build(name, len(size), num_landmarks=number, pad=pad)
    q = tokens(2, 3, math.prod(size), 6)
    expected, _ = sampler(q, size, None)
    region = tuple(slice(0, side) for side in size)
    canvas = torch.full((2, 3, *padded, 6), 1e6, dtype=q.dtype)
    canvas[(slice(None), slice(None), *region)] = q.unflatten(2, size)
    mask = torch.zeros(2, *padded, dtype=torch.bool)
    mask[(slice(None), *region)] = True
    landmarks, kept = sampler(canvas.flatten(2, -2), padded, mask.flatten(1))
    assert (kept.sum(-1) == expected.shape[-2]).all()
    for i in range(2):
        assert relative_error(landmarks[i][:, kept[i]], expected[i]) < 1e-12


def test_a_mask_may_differ_from_sample_to_sample() -> None:
    """Each sample of a batch gets what it gets alone."""
    q = tokens(3, 2, 20, 6)
    lengths = torch.tensor([20, 11, 3])
    mask = torch.arange(20) < lengths[:, None]
    for name in SAMPLERS:
        for number in (None, 4):
            sampler = build(name, 1, num_landmarks=number)
            landmarks, kept = sampler(q, (20,), mask)
            for i, length in enumerate(lengths.tolist()):
                alone, _ = sampler(q[i : i + 1, :, :length], (length,), None)
                assert relative_error(landmarks[i][:, kept[i]], alone[0]) < 1e-12


def test_random_is_one_draw_a_step_and_fixed_in_evaluation() -> None:
    q = tokens(1, 1, 100, 6).expand(4, 2, -1, -1)
    sampler = build("random", 1, num_landmarks=9)
    first, second = sampler(q, (100,), None)[0], sampler(q, (100,), None)[0]
    assert torch.equal(first, second)
    assert len(first[0, 0].unique(dim=0)) == 9
    assert all(torch.equal(first[0, 0], x) for x in first.flatten(0, 1))
    sampler.train()
    drawn = [sampler(q, (100,), None)[0] for _ in range(3)]
    assert not torch.equal(drawn[0], drawn[1])
    assert all(torch.equal(drawn[0][0, 0], x) for x in drawn[0].flatten(0, 1))


def test_biased_takes_the_first() -> None:
    q = tokens(1, 2, 20, 6)
    landmarks, _ = build("biased", 1, num_landmarks=5)(q, (20,), None)
    assert torch.equal(landmarks, q[:, :, :5])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ndim": 3}, r"ndim must be 1 \(sequences\) or 2 \(images\), got 3"),
        ({"ratio": 0}, "ratio must be at least 1, got 0"),
        ({"pad": "zeros"}, "pad must be 'replicate' or 'drop', got 'zeros'"),
        ({"num_landmarks": 50}, "num_landmarks must be a square number for images, got 50"),
        ({"num_landmarks": 0}, "num_landmarks must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("conv", **{"ndim": 2, **kwargs})


def test_dropping_needs_a_whole_window() -> None:
    with pytest.raises(ValueError, match=r"at least the ratio 4, got \(3, 14\)"):
        build("avg", 2, pad="drop")(tokens(1, 1, 42, 6), (3, 14), None)


def test_averages_of_large_tokens_stay_in_float16() -> None:
    """The sum of a window of these does not."""
    q = torch.full((1, 1, 16, 6), 3e4, dtype=torch.float16)
    landmarks, _ = SAMPLERS["avg"](6, 2, ratio=4, num_landmarks=None)(q, (4, 4), None)
    assert torch.equal(landmarks, q[:, :, :1])
