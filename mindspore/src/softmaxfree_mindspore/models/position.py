"""Learned positions of a grid of any size, resized bilinearly."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer
from mindspore.ops import constexpr

from ..layers.samplers import Size


class PositionEmbedding(nn.Cell):
    """Adds learned positions to tokens, to prefix tokens too.

    Args:
        size: The grid that positions are learned for.
        dim: Width of the tokens.
        prefix_tokens: How many tokens come before the grid.
    """

    def __init__(self, size: Size, dim: int, prefix_tokens: int) -> None:
        super().__init__()
        self.size = size
        self.grid = Parameter(initializer(Normal(0.02), (1, *size, dim)))
        self.prefix = (
            Parameter(initializer(Normal(0.02), (1, prefix_tokens, dim))) if prefix_tokens else None
        )

    def construct(self, x: Tensor, size: Size) -> Tensor:
        """Tokens (B, prefix + H W, dim) of a grid (H, W), with their positions added."""
        grid, dim = self.grid, x.shape[-1]
        if size != self.size:
            (height, width), (old_height, old_width) = size, self.size
            rows, columns = _bilinear(old_height, height), _bilinear(old_width, width)
            grid = ops.matmul(rows, grid.reshape(old_height, old_width * dim))
            grid = ops.matmul(columns, grid.reshape(height, old_width, dim))
        grid = grid.reshape(1, size[0] * size[1], dim)
        if self.prefix is not None:
            grid = ops.cat((self.prefix, grid), 1)
        return x + grid.astype(x.dtype)


def resize_grid(grid: np.ndarray, size: Size) -> np.ndarray:
    """(1, H, W, C) -> (1, height, width, C), bilinearly."""
    if grid.ndim != 4 or grid.shape[1:3] == tuple(size):
        return grid
    rows, columns = (bilinear_matrix(*sides) for sides in zip(grid.shape[1:3], size))
    return np.einsum("hi,wj,nijc->nhwc", rows, columns, grid, optimize=True).astype(grid.dtype)


def bilinear_matrix(old: int, new: int) -> np.ndarray:
    """(new, old): what every new place takes of the old ones, pixels' centres kept in line."""
    place = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(old)))


@constexpr
def _bilinear(old: int, new: int) -> Tensor:
    return Tensor(bilinear_matrix(old, new).astype(np.float32))
