"""P, the kernel between n tokens and m landmarks, in tiles that stay in a CPU's cache.

Kernel values are stored as (m, tokens), which makes the faster products.
"""

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..distances import (
    FAR,
    TO_BASE_2,
    centred,
    columns_of,
    far_gradient,
    far_kernel,
    far_matrices,
    measure_into,
)
from ..scratch import scratch

_TILE_BYTES = 2**21
"""Size of one tile's kernel values, per thread."""

_STORED_BYTES = 2**25
"""Largest size of kernel values that are stored: those of one stack for its second use, and those
of all stacks for the backward pass. Computing more of them again takes no longer than writing
them to memory and reading them back."""

TileKernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Writes one tile of kernel values, see `Torch.kernel_of_tokens`."""

Kept = tuple[Tensor | None, Tensor | None]
"""Kernel values of queries and of keys; None for those that were not stored."""


def tile_tokens(q: Tensor, k: Tensor | None, landmarks: Tensor) -> int:
    """How many tokens, counted over all matrices of the stack, make a tile."""
    if q.device.type != "cpu":  # one tile
        return len(landmarks) * max(q.shape[2], 0 if k is None else k.shape[2])
    return max(64, _TILE_BYTES * torch.get_num_threads() // (landmarks.shape[1] * q.element_size()))


class Stack(NamedTuple):
    """Consecutive matrices of the whole stack: some heads of one image."""

    image: int
    head: int
    size: int
    heads: int
    """Of every image."""

    @property
    def first(self) -> int:
        return self.image * self.heads + self.head

    def of(self, tensor: Tensor) -> Tensor:
        """Their part of a tensor (b, ...)."""
        return _part(tensor, 0, self.first, self.size)


class _Tile(NamedTuple):
    """Consecutive tokens of a stack."""

    stack: Stack
    first: int
    size: int

    def of(self, tokens: Tensor) -> Tensor:
        """(images, heads, n, d) -> (matrices, tokens, d)."""
        heads = _part(tokens[self.stack.image], 0, self.stack.head, self.stack.size)
        return _part(heads, 1, self.first, self.size)


def _part(tensor: Tensor, dim: int, first: int, size: int) -> Tensor:
    return tensor if size == tensor.shape[dim] else tensor.narrow(dim, first, size)


def _spans(length: int, most: int) -> list[tuple[int, int]]:
    """(first, size) of consecutive parts of nearly equal size, none larger than `most`."""
    step = math.ceil(length / math.ceil(length / most))
    return [(start, min(step, length - start)) for start in range(0, length, step)]


class Landmarks:
    """The landmarks of all matrices, prepared for the comparison with tokens."""

    def __init__(self, landmarks: Tensor, scale: float) -> None:
        self.scale = scale
        self.centre, (self.y, norms) = centred(landmarks, scale * TO_BASE_2)  # (b, 1, d), (b, m, d)
        self.columns = columns_of((self.y, norms), scale * TO_BASE_2)
        limit = FAR / (scale * TO_BASE_2) ** 2
        # By matrix: which landmarks are too far from the centre for the product, and these.
        self.far: dict[int, tuple[Tensor, Tensor]] = {}
        for (i,) in far_matrices(norms, limit):
            which = (norms[i, :, 0] > limit).nonzero().flatten()
            self.far[i] = which, landmarks[i, which]


def stacks_of(q: Tensor, k: Tensor | None, tile_tokens: int) -> list[Stack]:
    """The matrices in parts: a tile is several whole matrices, or a part of a single one."""
    images, heads, n = q.shape[:3]
    longest = n if k is None else max(n, k.shape[2])
    spans = _spans(heads, max(1, tile_tokens // longest))
    return [Stack(image, *span, heads) for image in range(images) for span in spans]


class Factor:
    """P between some tokens and the landmarks: products with it, and their gradient.

    Args:
        kernel: Computes a tile.
        tokens: (images, heads, n, d).
        landmarks: Those of all matrices.
        largest_stack: Matrices in the largest part of the stack.
        tile_tokens: Tokens in a tile, counted over the matrices of a part.
        keep: Whether to store all kernel values for the backward pass, if they are few enough.
        kept: The kernel values that the forward pass stored.
        role: Name of the memory for kernel values that are not stored.
    """

    def __init__(
        self,
        kernel: TileKernel,
        tokens: Tensor,
        landmarks: Landmarks,
        largest_stack: int,
        tile_tokens: int,
        keep: bool,
        kept: Tensor | None,
        role: str,
    ) -> None:
        self.kernel, self.tokens, self.landmarks = kernel, tokens, landmarks
        (b, m), n = landmarks.y.shape[:2], tokens.shape[2]
        self.spans = _spans(n, tile_tokens)
        self.complete = kept is not None
        if kept is None and keep and b * m * n * tokens.element_size() <= _STORED_BYTES:
            kept = tokens.new_empty(b, m * n)
        self.kept = kept  # (b, m * n): tile after tile, each of them (m, tokens)
        stack_bytes = largest_stack * m * n * tokens.element_size()
        self.holds_stack = kept is not None or len(self.spans) == 1 or stack_bytes <= _STORED_BYTES
        if kept is None:  # room for one stack, or for one tile
            count = n if self.holds_stack else self.spans[0][1]
            self.buffer = scratch(role, tokens, largest_stack, m * count)
        self.held: Stack | None = None  # the part whose kernel values are in the buffer

    def contract(self, stack: Stack, values: Tensor, out: Tensor) -> Tensor:
        """P^T V: values (images, heads, n, e) -> out (size of the stack, m, e)."""
        for tile, p in self._tiles(stack):
            out.baddbmm_(p, tile.of(values), beta=int(tile.first > 0))
        return out

    def expand(self, stack: Stack, w: Tensor, out: Tensor) -> None:
        """P W: (size of the stack, m, e) -> its part of out (images, heads, n, e)."""
        for tile, p in self._tiles(stack):
            torch.bmm(p.mT, w, out=tile.of(out))

    def pull_back(
        self,
        stack: Stack,
        as_queries: tuple[Tensor, Tensor] | None,
        as_keys: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Adds up the gradients of tokens and landmarks, for `gradients`.

        Args:
            stack: The matrices.
            as_queries: (G, W) for the gradient G W^T of P, if these tokens are the queries.
            as_keys: (V, dS, dV) for the gradient V dS^T of P, if these tokens are the keys;
                P dS is written to dV.
        """
        for tile, p in self._tiles(stack):
            grad_p = scratch("gradient of kernel", p, *p.shape)
            if as_queries is not None:
                grad, w = as_queries
                torch.bmm(w, tile.of(grad).mT, out=grad_p)
            if as_keys is not None:
                v, grad_s, grad_v = as_keys
                torch.bmm(p.mT, grad_s, out=tile.of(grad_v))
                grad_p.baddbmm_(grad_s, tile.of(v).mT, beta=int(as_queries is not None))
            self._pull_back_kernel(tile, grad_p, p)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of the tokens (images, heads, n, d) and the landmarks (b, m, d)."""
        grad_tokens, wx, w1 = self._sums
        wx.addcmul_(w1, self.landmarks.y, value=-1)
        return grad_tokens, wx * self.landmarks.scale**2

    def _tiles(self, stack: Stack) -> Iterator[tuple[_Tile, Tensor]]:
        """Tiles and their kernel values, (matrices, m, tokens), computed if they are not there."""
        there = self.complete or (self.holds_stack and self.held == stack)
        for span in self.spans:
            tile = _Tile(stack, *span)
            values = self._memory(tile)
            if not there:
                self._compute(tile, values)
            yield tile, values
        self.held = stack

    def _memory(self, tile: _Tile) -> Tensor:
        m = self.landmarks.y.shape[1]
        if self.kept is not None:
            rows, first = tile.stack.of(self.kept), tile.first
        else:
            rows = _part(self.buffer, 0, 0, tile.stack.size)
            first = tile.first if self.holds_stack else 0
        return _part(rows, 1, m * first, m * tile.size).view(-1, m, tile.size)

    def _compute(self, tile: _Tile, out: Tensor) -> None:
        landmarks, tokens = self.landmarks, tile.of(self.tokens)
        self.kernel(tokens, tile.stack.of(landmarks.centre), tile.stack.of(landmarks.columns), out)
        for i, which, far in self._far(tile.stack):
            out[i, which] = far_kernel(far, tokens[i], landmarks.scale).to(out.dtype)

    def _far(self, stack: Stack) -> list[tuple[int, Tensor, Tensor]]:
        """(matrix of the stack, which of its landmarks are far, these)."""
        far, first = self.landmarks.far, stack.first
        return [(i, *far[first + i]) for i in range(stack.size) if first + i in far] if far else []

    def _pull_back_kernel(self, tile: _Tile, grad_p: Tensor, p: Tensor) -> None:
        """Takes the gradient of P^T, (matrices, m, tokens), to tokens and landmarks; overwrites it.

        The equations are those of `kernel._Kernel`, with W = dP * P and s^2 factored out.
        """
        stack, scale = tile.stack, self.landmarks.scale
        grad_tokens, wx, w1 = self._sums
        tokens, far = tile.of(self.tokens), self._far(stack)
        exact = [far_gradient([y, tokens[i]], grad_p[i, which], scale) for i, which, y in far]
        weights = grad_p.mul_(p)
        for i, which, _ in far:
            weights[i, which] = 0
        x = measure_into(
            scratch("tokens", tokens, *tokens.shape), tokens, stack.of(self.landmarks.centre)
        )
        grad_x = torch.bmm(weights.mT, stack.of(self._scaled_y), out=tile.of(grad_tokens))
        grad_x.addcmul_(weights.sum(1).unsqueeze(-1), x, value=-(scale**2))
        grad_y = stack.of(wx).baddbmm_(weights, x)
        stack.of(w1).add_(weights.sum(2, keepdim=True))
        for (i, which, _), (own, grad) in zip(far, exact):
            grad_x[i] += grad
            grad_y[i, which] += own / scale**2

    @cached_property
    def _scaled_y(self) -> Tensor:
        return self.landmarks.y * self.landmarks.scale**2

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of all tiles: the gradient of the tokens; W x, (b, m, d), and W 1, (b, m, 1)."""
        y = self.landmarks.y
        return torch.empty_like(self.tokens), torch.zeros_like(y), y.new_zeros(*y.shape[:2], 1)
