"""Samplers: how the landmarks are made from the queries of an image.

Each takes heads of tokens (B, heads, N, d) on a grid (H, W) and gives landmarks (B, heads, m, d).
`ratio=r` makes one landmark of every r x r tokens; `num_landmarks=m` makes m of them at every size,
or one for each window if there are fewer.
"""

import math

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import HeUniform, initializer
from mindspore.ops import constexpr

from ..ops.products import product

Size = tuple[int, int]
"""(H, W)."""


class Sampler(nn.Cell):
    """What all samplers share.

    Args:
        head_dim: d, width of the tokens.
        ratio: Side of the window that becomes one landmark.
        num_landmarks: A fixed number, a square; None derives it from the ratio.
        pad: What becomes of sides that the ratio does not divide: `replicate` pads them,
            `drop` leaves the remainder out, as the released models do.
    """

    def __init__(self, head_dim: int, ratio: int, num_landmarks: int | None, pad: str) -> None:
        super().__init__()
        if ratio < 1:
            raise ValueError(f"ratio must be at least 1, got {ratio}")
        if pad not in ("replicate", "drop"):
            raise ValueError(f"pad must be 'replicate' or 'drop', got {pad!r}")
        if num_landmarks is not None and (
            num_landmarks < 1 or math.isqrt(num_landmarks) ** 2 != num_landmarks
        ):
            raise ValueError(
                f"num_landmarks must be a square number, 1 or more, got {num_landmarks}"
            )
        self.head_dim, self.ratio, self.num_landmarks, self.pad = (
            head_dim, ratio, num_landmarks, pad,
        )  # fmt: skip

    def grid(self, size: Size) -> Size:
        """How many windows of the ratio there are along each side."""
        height, width = size
        if self.pad == "replicate":
            return (height + self.ratio - 1) // self.ratio, (width + self.ratio - 1) // self.ratio
        if min(height, width) < self.ratio:
            raise ValueError(
                f"with pad='drop' every side must be at least the ratio {self.ratio}, got {size}; "
                "use pad='replicate' or a smaller ratio"
            )
        return height // self.ratio, width // self.ratio

    def windows(self, q: Tensor, size: Size, grid: Size) -> Tensor:
        """(B, heads, N, d) -> (B, heads, m, r^2, d), row by row as a convolution's.

        Where windows stick out of the grid, they repeat its last tokens; tokens beyond the last
        window are left out.
        """
        (b, heads, _, d), r = q.shape, self.ratio
        x = q.reshape(b, heads, size[0], size[1], d)
        x = _fit(_fit(x, 2, grid[0] * r), 3, grid[1] * r)
        x = x.reshape(b, heads, grid[0], r, grid[1], r, d).swapaxes(3, 4)
        return x.reshape(b, heads, grid[0] * grid[1], r * r, d)


class ConvSampler(Sampler):
    """A convolution of kernel and stride r, shared by the heads, without bias (the default).

    With `num_landmarks`, its output is pooled to that many.
    """

    def __init__(self, head_dim: int, ratio: int, num_landmarks: int | None, pad: str) -> None:
        super().__init__(head_dim, ratio, num_landmarks, pad)
        start = HeUniform(negative_slope=math.sqrt(5))
        self.weight = Parameter(initializer(start, (head_dim, head_dim, ratio, ratio)))

    def construct(self, q: Tensor, size: Size) -> Tensor:
        grid = self.grid(size)
        windows = self.windows(q, size, grid)
        b, heads, m, kernel, d = windows.shape
        weight = self.weight.reshape(d, d, kernel).transpose(2, 1, 0).reshape(kernel * d, d)
        landmarks = product(windows.reshape(b * heads * m, kernel * d), weight.astype(q.dtype))
        landmarks = landmarks.reshape(b, heads, m, d)
        if self.num_landmarks is None:
            return landmarks
        return pool(landmarks, grid, bins(self.num_landmarks, grid))


class AvgSampler(Sampler):
    """The average of every window, over the tokens that are there."""

    def construct(self, q: Tensor, size: Size) -> Tensor:
        if self.num_landmarks is not None:
            return pool(q, size, bins(self.num_landmarks, size))
        return _weigh(q, size, _window_weights(size, self.grid(size), self.ratio))


class RandomSampler(Sampler):
    """Tokens picked at random, the same places for a whole batch: drawn anew at every training
    step, fixed in evaluation."""

    def construct(self, q: Tensor, size: Size) -> Tensor:
        count = self.count(size)
        if self.training:
            chosen = ops.randperm(size[0] * size[1])[:count]
        else:
            chosen = _hashed_order(size, count)
        return ops.gather(q, chosen, 2)

    def count(self, size: Size) -> int:
        if self.num_landmarks is not None:
            return min(self.num_landmarks, size[0] * size[1])
        grid = self.grid(size)
        return grid[0] * grid[1]


class BiasedSampler(RandomSampler):
    """The first tokens, the paper's worst case."""

    def construct(self, q: Tensor, size: Size) -> Tensor:
        return q[:, :, : self.count(size)]


SAMPLERS: dict[str, type[Sampler]] = {
    "conv": ConvSampler,
    "avg": AvgSampler,
    "random": RandomSampler,
    "biased": BiasedSampler,
}
"""Every sampler by its name."""


def bins(num_landmarks: int, grid: Size) -> Size:
    """Landmarks along each side, at most as many as there are windows or tokens to pool."""
    side = _root(num_landmarks)
    return min(side, grid[0]), min(side, grid[1])


def pool(x: Tensor, size: Size, grid: Size) -> Tensor:
    """Averages tokens (B, heads, N, d) into bins, as adaptive pooling does: bin i of g covers the
    tokens floor(i L / g) to ceil((i + 1) L / g) of the L along a side."""
    return x if size == grid else _weigh(x, size, _bin_weights(size, grid))


def _weigh(x: Tensor, size: Size, weights: tuple[Tensor, Tensor]) -> Tensor:
    """Rows (g_h, H) and columns (g_w, W) of weights on tokens: -> (B, heads, g_h g_w, d)."""
    rows, columns = weights[0].astype(x.dtype), weights[1].astype(x.dtype)
    b, heads, _, d = x.shape
    x = ops.matmul(rows, x.reshape(b, heads, size[0], size[1] * d))
    x = ops.matmul(columns, x.reshape(b, heads, rows.shape[0], size[1], d))
    return x.reshape(b, heads, rows.shape[0] * columns.shape[0], d)


def _fit(x: Tensor, axis: int, length: int) -> Tensor:
    """An axis made longer by its last entry, or shorter."""
    side = x.shape[axis]
    return x if side == length else ops.gather(x, _clamped(length, side), axis)


@constexpr
def _root(square: int) -> int:
    return math.isqrt(square)


@constexpr
def _clamped(length: int, side: int) -> Tensor:
    """0, 1, ... up to the last of a side, which is repeated: (length,)."""
    return Tensor(np.minimum(np.arange(length), side - 1).astype(np.int32))


@constexpr
def _bin_weights(size: Size, grid: Size) -> tuple[Tensor, Tensor]:
    return _averages(*(_bins(*sides) for sides in zip(size, grid)))


@constexpr
def _window_weights(size: Size, grid: Size, ratio: int) -> tuple[Tensor, Tensor]:
    return _averages(*(_windows(*sides, ratio) for sides in zip(size, grid)))


def _bins(side: int, count: int) -> np.ndarray:
    """Which of a side's tokens fall into which bin: (count, side), of 0 and 1."""
    i, place = np.arange(count)[:, None], np.arange(side)
    return (place >= i * side // count) & (place < ((i + 1) * side + count - 1) // count)


def _windows(side: int, count: int, ratio: int) -> np.ndarray:
    """Which fall into which window: (count, side)."""
    return np.arange(side) // ratio == np.arange(count)[:, None]


def _averages(*inside: np.ndarray) -> tuple[Tensor, ...]:
    return tuple(Tensor((x / x.sum(-1, keepdims=True)).astype(np.float32)) for x in inside)


@constexpr
def _hashed_order(size: Size, count: int) -> Tensor:
    """The first places of a fixed random order, which does not change where the grid grows."""
    place = (np.arange(size[0], dtype=np.int64)[:, None] << 20) + np.arange(size[1])
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        place = ((place ^ (place >> 16)) + 0x9E3779B9) * multiplier & 0xFFFFFFFF
    order = (place.ravel() >> 8).argsort(kind="stable")
    return Tensor(order[:count].astype(np.int32))
