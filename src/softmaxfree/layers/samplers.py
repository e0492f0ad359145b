"""Samplers: how the landmarks are made from the queries, on a line or on a grid.

Each takes heads of tokens (B, heads, N, d) on a grid of some size, and a mask of the tokens to
keep, and gives landmarks (B, heads, m, d) and a mask of those to keep. `ratio=r` makes one
landmark of every r tokens of a line, of every r x r of a grid. `num_landmarks=m` makes m of
them at every size, or fewer where there are not as many tokens (windows, for `conv`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..ops.precision import compute_dtype
from ..ops.tracing import ceil_div, is_exporting

Size = tuple[int, ...]
"""(N,) for a sequence, (H, W) for an image."""

Sample = tuple[Tensor, Tensor | None]
"""Landmarks (B, heads, m, d) and which of them to keep (B, m), None for all."""


class Sampler(nn.Module):
    """Base of the samplers: checks of the arguments, and numbers of windows and landmarks.

    Called with q (B, heads, N, d), its size and a mask (B, N) or None; returns landmarks
    (B, heads, m, d) and a mask (B, m), None where all are to be kept.

    Args:
        head_dim: d, width of the tokens.
        ndim: 1 for sequences, 2 for images.
        ratio: Side of the window that becomes one landmark.
        num_landmarks: A fixed number, a square for images; None derives it from the ratio.
        pad: What becomes of sides that the ratio does not divide: `replicate` pads them,
            `drop` leaves the remainder out, as the released models do.
    """

    def __init__(
        self,
        head_dim: int,
        ndim: int,
        ratio: int,
        num_landmarks: int | None,
        pad: str = "replicate",
    ) -> None:
        super().__init__()
        if ndim not in (1, 2):
            raise UserError(f"ndim must be 1 (sequences) or 2 (images), got {ndim}")
        if ratio < 1:
            raise UserError(f"ratio must be at least 1, got {ratio}")
        if pad not in ("replicate", "drop"):
            raise UserError(f"pad must be 'replicate' or 'drop', got {pad!r}")
        if num_landmarks is not None:
            if num_landmarks < 1:
                raise UserError(f"num_landmarks must be at least 1, got {num_landmarks}")
            if ndim == 2 and math.isqrt(num_landmarks) ** 2 != num_landmarks:
                raise UserError(
                    f"num_landmarks must be a square number for images, got {num_landmarks}"
                )
        self.head_dim, self.ndim, self.ratio, self.num_landmarks, self.pad = (
            head_dim, ndim, ratio, num_landmarks, pad,
        )  # fmt: skip

    def grid(self, size: Size) -> Size:
        """How many windows of the ratio there are along each side."""
        if self.pad == "replicate":
            return tuple(ceil_div(side, self.ratio) for side in size)
        if min(size) < self.ratio:
            raise UserError(
                f"with pad='drop' every side must be at least the ratio {self.ratio}, got {size}; "
                "use pad='replicate' or a smaller ratio"
            )
        return tuple(side // self.ratio for side in size)

    def kept_windows(self, mask: Tensor, size: Size) -> Tensor:
        """Windows with any kept token, (B, m); with `drop`, only fully kept ones."""
        inside = window_mask(mask, size, self.grid(size), self.ratio)
        return inside.any(-1) if self.pad == "replicate" else inside.all(-1)

    def bins(self, grid: Size) -> Size:
        """Landmarks along each side, at most as many as there are tokens to pool."""
        assert self.num_landmarks is not None
        side = self.num_landmarks if self.ndim == 1 else math.isqrt(self.num_landmarks)
        return tuple(torch.sym_min(side, length) for length in grid)  # type: ignore[misc]

    def extra_repr(self) -> str:
        landmarks = "" if self.num_landmarks is None else f", num_landmarks={self.num_landmarks}"
        return f"ndim={self.ndim}, ratio={self.ratio}{landmarks}, pad={self.pad!r}"


class ConvSampler(Sampler):
    """A convolution of kernel and stride r, shared by the heads, without bias (the default).

    With `num_landmarks`, its output is pooled to that many.
    """

    def __init__(self, head_dim: int, ndim: int, ratio: int, *others: Any, **options: Any) -> None:
        super().__init__(head_dim, ndim, ratio, *others, **options)
        self.weight = nn.Parameter(torch.empty(head_dim, head_dim, *[ratio] * ndim))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, q: Tensor, size: Size, mask: Tensor | None) -> Sample:
        grid = self.grid(size)
        if mask is None and self.num_landmarks is not None:
            return self._pooled_first(q, size, grid, self.bins(grid)), None
        if mask is not None:
            q = fill_dropped(q, size, mask)
        windows = split_windows(q, size, grid, self.ratio, replicate=True)
        landmarks = self.convolve(windows)
        if mask is not None:
            mask = self.kept_windows(mask, size)
        if self.num_landmarks is None:
            return landmarks, mask
        return pool(landmarks, grid, self.bins(grid), mask)

    def convolve(self, windows: Tensor) -> Tensor:
        """(..., m, kernel tokens, d) -> (..., m, d), with the weights in the windows' order."""
        weight = self.weight.flatten(2).permute(2, 1, 0).flatten(0, 1)
        return windows.flatten(-2) @ weight.to(windows.dtype)

    def _pooled_first(self, q: Tensor, size: Size, grid: Size, bins: Size) -> Tensor:
        """Averages windows before convolving them, which gives the same result.

        The convolution then runs on as many windows as there are landmarks.
        """
        x = q.transpose(1, 2).unflatten(1, size)  # (B, *size, heads, d), as it lies in memory
        for axis, (side, length, count) in enumerate(zip(size, grid, bins), start=1):
            x = fit(x, axis - x.ndim, side, length * self.ratio, replicate=True)
            x = average(x.unflatten(axis, (length, self.ratio)), axis, length, count)
            x = x.flatten(axis, axis + 1)
        windows = split_windows(
            x.flatten(1, -3).transpose(1, 2),
            tuple(count * self.ratio for count in bins), bins, self.ratio, replicate=True,
        )  # fmt: skip
        return self.convolve(windows)


class AvgSampler(Sampler):
    """The average of every window, over the tokens that are there and kept."""

    def forward(self, q: Tensor, size: Size, mask: Tensor | None) -> Sample:
        if self.num_landmarks is not None:
            return pool(q, size, self.bins(size), mask)
        grid = self.grid(size)
        present = q.new_ones(1, math.prod(size), dtype=torch.bool) if mask is None else mask
        if mask is not None:
            q = q.masked_fill(~mask[:, None, :, None], 0)
        windows = split_windows(q, size, grid, self.ratio, replicate=False)
        counts = window_mask(present, size, grid, self.ratio).sum(-1)
        total = windows.sum(-2, dtype=compute_dtype(q))  # in float16 it would leave the range
        landmarks = (total / counts.clamp(min=1)[:, None, :, None]).to(q.dtype)
        return landmarks, None if mask is None else self.kept_windows(mask, size)


class RandomSampler(Sampler):
    """Tokens at random places, the same for a whole batch.

    Places are drawn anew at every training step and fixed in evaluation.
    """

    def forward(self, q: Tensor, size: Size, mask: Tensor | None) -> Sample:
        return pick(
            q, self.order(size, q.device), self.count(size), self.kept_count(size, mask), mask
        )

    def order(self, size: Size, device: torch.device) -> Tensor:
        """Numbers (N,); the tokens with the smallest ones are picked."""
        if self.training:
            return torch.rand(math.prod(size), device=device)
        return _hashed(size, device)

    def count(self, size: Size) -> int:
        """Number of landmarks of a grid without a mask."""
        if self.num_landmarks is not None:
            return min(self.num_landmarks, math.prod(size))
        return math.prod(self.grid(size))

    def kept_count(self, size: Size, mask: Tensor | None) -> Tensor | None:
        """How many landmarks the kept tokens alone would have, (B, 1); None without a mask."""
        if mask is None:
            return None
        if self.num_landmarks is not None:
            return mask.sum(-1, keepdim=True).clamp(max=self.num_landmarks)
        kept = mask.unflatten(-1, size)
        lines = [kept] if len(size) == 1 else [kept.any(2), kept.any(1)]
        lengths = torch.stack([line.sum(-1, keepdim=True) for line in lines])
        if self.pad == "replicate":
            lengths = lengths + self.ratio - 1
        return (lengths // self.ratio).prod(0)


class BiasedSampler(RandomSampler):
    """The first tokens, the paper's worst case."""

    def order(self, size: Size, device: torch.device) -> Tensor:
        return torch.arange(math.prod(size), device=device).float()


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "conv": ConvSampler,
    "avg": AvgSampler,
    "random": RandomSampler,
    "biased": BiasedSampler,
}
"""Every sampler by its name."""


def landmark_grid(
    max_size: Sequence[int], ndim: int, ratio: int, num_landmarks: int | None
) -> Size:
    """The grid of landmarks that `avg` makes of a layer's largest grid of tokens."""
    if len(max_size) != ndim or min(max_size) < 1:
        raise UserError(f"max_size must be {ndim} sides of 1 or more, got {tuple(max_size)}")
    sampler, size = AvgSampler(1, ndim, ratio, num_landmarks), tuple(max_size)
    return sampler.grid(size) if num_landmarks is None else sampler.bins(size)


def sample_grid(
    sampler: Sampler, tokens: Tensor, size: Size, mask: Tensor | None, prefix: int
) -> Sample:
    """Landmarks of tokens (B, heads, prefix + N, d): all of the prefix, samples of the grid."""
    grid_mask = None if mask is None else mask[:, prefix:]
    sampled = sampler(tokens[..., prefix:, :], size, grid_mask)
    if prefix == 0:
        return sampled
    return join((tokens[..., :prefix, :], None if mask is None else mask[:, :prefix]), sampled)


def join(first: Sample, second: Sample) -> Sample:
    """Landmarks of both samples, the first one's first."""
    (a, mask_a), (b, mask_b) = first, second
    landmarks = torch.cat([a, b], -2)
    if mask_a is None and mask_b is None:
        return landmarks, None
    masks = [
        torch.ones(a.shape[0], tokens.shape[-2], dtype=torch.bool, device=a.device)
        if mask is None
        else mask
        for tokens, mask in (first, second)
    ]
    return landmarks, torch.cat(masks, -1)


def split_windows(x: Tensor, size: Size, grid: Size, ratio: int, replicate: bool) -> Tensor:
    """Tokens (..., N, c) -> windows (..., m, ratio^ndim, c), row by row as a convolution's.

    Where windows stick out of the grid, they repeat its last tokens or hold zeros; tokens beyond
    the last window are left out.
    """
    x = x.unflatten(-2, size)
    for axis, (side, windows) in enumerate(zip(size, grid)):
        x = fit(x, axis - len(size) - 1, side, windows * ratio, replicate)
    if len(grid) == 1:
        return x.unflatten(-2, (grid[0], ratio))
    x = x.unflatten(-2, (grid[1], ratio)).unflatten(-4, (grid[0], ratio))
    # (..., H / r, r, W / r, r, c) -> (..., H / r, W / r, r, r, c)
    return x.transpose(-4, -3).flatten(-3, -2).flatten(-4, -3)


def fit(x: Tensor, dim: int, side: int, length: int, replicate: bool) -> Tensor:
    """Makes an axis of `side` entries `length` long: cut, or padded by its last entry or zeros."""
    if not is_exporting() and length == side:  # an exported graph is for all sizes
        return x
    if replicate:
        return x.index_select(dim, torch.arange(length, device=x.device).clamp(max=side - 1))
    return F.pad(x, [0, 0] * (-1 - dim) + [0, length - side])


def window_mask(mask: Tensor, size: Size, grid: Size, ratio: int) -> Tensor:
    """(B, N) -> (B, m, ratio^ndim), False outside the grid."""
    return split_windows(mask.unsqueeze(-1), size, grid, ratio, replicate=False).squeeze(-1)


def fill_dropped(x: Tensor, size: Size, mask: Tensor) -> Tensor:
    """Replaces dropped tokens by the kept one before them, along rows and then along columns.

    Padding by replication puts the same tokens there, so a padded and masked grid gives what the
    grid without padding gives.
    """
    x, mask = x.unflatten(-2, size), mask.unflatten(-1, size)
    for dim in range(len(size), 0, -1):
        positions = torch.arange(mask.shape[dim], device=x.device)
        positions = positions.view([-1 if axis == dim else 1 for axis in range(mask.ndim)])
        last_kept = torch.where(mask, positions, -1).cummax(dim).values
        # Before the first kept token: that one.
        first_kept = torch.where(mask, positions, mask.shape[dim] - 1).amin(dim, keepdim=True)
        source = torch.where(last_kept < 0, first_kept, last_kept)[:, None, ..., None]
        x = x.gather(dim + 1, source.expand_as(x))
        mask = mask.any(dim, keepdim=True).expand_as(mask)
    return x.flatten(2, -2)


def pool(x: Tensor, size: Size, bins: Size, mask: Tensor | None) -> Sample:
    """Averages tokens (B, heads, N, c) into a grid of bins.

    Bin i of g covers the tokens floor(i L / g) to ceil((i + 1) L / g) of the L along a side, as
    adaptive pooling does. With a mask (B, N), L counts the lines that hold a token to keep, and
    dropped tokens are left out: a padded and masked grid gives what the grid alone gives.
    """
    if mask is None:
        wide = x.unflatten(-2, size)
        for dim, (side, count) in enumerate(zip(size, bins), start=2):
            wide = average(wide, dim, side, count)
        return wide.flatten(2, -2), None

    kept = mask.unflatten(-1, size)
    weights = bin_weights(kept if len(size) == 1 else kept.any(2), bins[0])
    if len(size) == 2:
        columns = bin_weights(kept.any(1), bins[1])
        # (B, g_h, H), (B, g_w, W) -> (B, g_h * g_w, H * W)
        weights = torch.einsum("bgh,bkw->bgkhw", weights, columns).flatten(3).flatten(1, 2)
    weights = weights * mask.unsqueeze(1)
    total = weights.sum(-1, keepdim=True)
    wide = x.to(compute_dtype(x)).masked_fill(~mask[:, None, :, None], 0)
    weights = weights.to(wide.dtype) / total.clamp(min=1)
    return (weights.unsqueeze(1) @ wide).to(x.dtype), total.squeeze(-1) > 0


def average(x: Tensor, dim: int, side: int, bins: int) -> Tensor:
    """Averages an axis of `side` entries into bins, as adaptive pooling does."""
    if not is_exporting() and side == bins:  # an exported graph is for all sizes
        return x
    kept = torch.ones(1, side, dtype=torch.bool, device=x.device)
    wide = x.to(compute_dtype(x))
    weights = bin_weights(kept, bins).squeeze(0).to(wide.dtype)
    weights = weights / weights.sum(-1, keepdim=True)
    averages = weights @ wide.flatten(dim + 1)
    return averages.unflatten(-1, x.shape[dim + 1 :]).to(x.dtype)


def bin_weights(kept: Tensor, bins: int) -> Tensor:
    """Tells which of the kept tokens fall into which bin: (B, L) -> (B, bins, L), of 0 and 1.

    If there are fewer kept tokens than bins, each has a bin of its own and the rest are empty.
    """
    length = kept.sum(-1)[:, None, None]
    rank = (kept.cumsum(-1) - 1)[:, None, :]
    count = length.clamp(max=bins)
    i = torch.arange(bins, device=kept.device)[None, :, None]
    divisor = count.clamp(min=1)
    first = (i * length) // divisor
    last = ceil_div((i + 1) * length, divisor)
    inside = (rank >= first) & (rank < last) & kept[:, None, :] & (i < count)
    return inside.to(torch.float32)


def pick(
    q: Tensor, order: Tensor, count: int, kept_count: Tensor | None, mask: Tensor | None
) -> Sample:
    """Picks the `count` tokens of q (B, heads, N, d) with the smallest `order` (N,).

    With a mask (B, N), kept tokens come first, and all but the first `kept_count` (B, 1) are
    masked.
    """
    if mask is None:
        chosen = order.topk(count, largest=False).indices
        return q.index_select(-2, chosen), None
    order = order.expand_as(mask).masked_fill(~mask, math.inf)
    chosen = order.topk(count, dim=-1, largest=False).indices
    index = chosen[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
    kept = mask.gather(-1, chosen)
    if kept_count is not None:
        kept = kept & (torch.arange(count, device=q.device) < kept_count)
    return q.gather(-2, index), kept


def _hashed(size: Size, device: torch.device) -> Tensor:
    """A fixed random order of a grid's places, which does not change where the grid grows."""
    place = torch.zeros(1, dtype=torch.int64, device=device)
    for side in size:
        place = (place.unsqueeze(-1) << 20) + torch.arange(side, device=device)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        place = ((place ^ (place >> 16)) + 0x9E3779B9) * multiplier & 0xFFFFFFFF
    return (place.flatten() >> 8).float()  # 24 bits, exact
