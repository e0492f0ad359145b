"""P_q Z P_k^T V, the large part of the attention: everything with an axis of n tokens.

`_plain` is what the formula says, differentiable as often as one likes. `_Tiled` computes the
same tile by tile with its gradient in closed form: a tile's kernel values stay in the cache, and
little memory is allocated, which on a CPU costs as much as the products.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import native
from .batching import keep_signature, mapped_axis_first, needs_apply, needs_gradient
from .inverse import inverse_of_definite
from .kernel import (
    FAR,
    TO_BASE_2,
    centred,
    columns_of,
    exponents_of,
    far_gradient,
    far_kernel,
    far_matrices,
    measured,
    token_bound,
)
from .precision import without_autocast
from .scratch import scratch

_TILE_BYTES = 2**21
"""Kernel values of one tile, for each thread."""

_STORED_BYTES = 2**25
"""Kernel values that are kept: of a part of the stack within a pass, of all of it from the forward
to the backward pass. More of them are computed again, which takes no more time than to write them
to memory and to read them, and no memory."""


def nystrom(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    landmarks: Tensor,
    z: Tensor,
    factor: Tensor | None,
    scale: float,
) -> Tensor:
    """P_q Z P_k^T V for stacks of matrices, b = images * heads of them.

    Args:
        q: (images, heads, n, d) queries, in any order of memory.
        k: (images, heads, l, d) keys, or None if they are the queries.
        v: (images, heads, l, e) values.
        landmarks: (b, m, d).
        z: (b, m, m), Z itself; where its factor is given, the inverse of Z.
        factor: (b, m, m), lower Cholesky factor of the inverse of Z, which need not be formed then.
        scale: What tokens and landmarks are multiplied with before they are compared.

    Returns:
        (images, heads, n, e).
    """
    if torch.compiler.is_compiling():
        return _plain(q, k, v, landmarks, z, factor, scale)
    tensors = (q, k, v, landmarks, z, factor)
    tiled = _Tiled.apply if needs_apply(*tensors) else _Tiled.forward
    tile_tokens, keep = _tile_tokens(q, k, landmarks), needs_gradient(*tensors)
    return tiled(*tensors, scale, tile_tokens, keep)[0]


def _tile_tokens(q: Tensor, k: Tensor | None, landmarks: Tensor) -> int:
    """How many tokens, over all matrices of the stack, make a tile."""
    if q.device.type != "cpu":
        return len(landmarks) * max(q.shape[2], 0 if k is None else k.shape[2])
    return max(64, _TILE_BYTES * torch.get_num_threads() // (landmarks.shape[1] * q.element_size()))


def _plain(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    landmarks: Tensor,
    z: Tensor,
    factor: Tensor | None,
    scale: float,
) -> Tensor:
    with without_autocast(q):
        if factor is not None:
            z = inverse_of_definite(z)
        centre, right = centred(landmarks, scale * TO_BASE_2)

        def kernel(tokens: Tensor) -> Tensor:
            left = measured(tokens.flatten(0, 1), centre)
            return exponents_of(right, left, scale * TO_BASE_2).clamp(max=0).exp2()  # (b, m, n)

        p_q = kernel(q)
        p_k = p_q if k is None else kernel(k)
        out = p_q.mT @ (z @ (p_k @ v.flatten(0, 1)))
        return out.unflatten(0, v.shape[:2])


class _Tiled(torch.autograd.Function):
    """`_plain`, tile by tile. With the result come P_k^T V and P for the backward pass.

    They carry no gradient: where the backward pass is itself differentiated, it goes through
    `_plain`.
    """

    @staticmethod
    @keep_signature
    def forward(
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        landmarks: Tensor,
        z: Tensor,
        factor: Tensor | None,
        scale: float,
        tile_tokens: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        with without_autocast(q):
            stacks, queries, keys = _sides(q, k, landmarks, scale, tile_tokens)
            if keep:
                queries.keep()
                keys.keep()
            # Values of all heads of a token may lie side by side in memory: so will the results.
            out = (
                torch.empty_like(v)
                if v.shape[2] == q.shape[2]
                else v.new_empty(*q.shape[:3], v.shape[-1])
            )
            summary = q.new_zeros(*landmarks.shape[:2], v.shape[-1])  # P_k^T V
            for stack in stacks:
                part = stack.of(summary)
                for tile in keys.tiles(stack):
                    part.baddbmm_(keys.fill(tile), tile.of(v))
                mixed = _multiplied(z, factor, stack, part)
                for tile in queries.tiles(stack):
                    p = queries.again(tile) if k is None else queries.fill(tile)
                    torch.bmm(p.mT, mixed, out=tile.of(out))
        if not keep:
            return out, None, None, None
        return out, summary, queries.kept, None if k is None else keys.kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, ctx.scale, ctx.tile_tokens, _ = inputs
        _, *intermediates = output
        ctx.mark_non_differentiable(*(x for x in intermediates if x is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *intermediates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        q, k, v, landmarks, z, factor, summary, p_q, p_k = ctx.saved_tensors
        scale = ctx.scale
        if torch.is_grad_enabled() or summary is None:
            inputs = (q, k, v, landmarks, z, factor, scale)
            return *_differentiable_gradient(grad, *inputs), *[None] * 4

        with without_autocast(q):
            stacks, queries, keys = _sides(q, k, landmarks, scale, ctx.tile_tokens)
            queries.prepare_backward(p_q)
            if k is not None:
                keys.prepare_backward(p_k)
            grad_v, grad_z = torch.empty_like(v), torch.empty_like(z)
            for stack in stacks:
                part = stack.of(summary)
                grad_mixed = torch.zeros_like(part)
                for tile in queries.tiles(stack):
                    p = queries.fill(tile) if p_q is None else queries.at(tile)
                    grad_mixed.baddbmm_(p, tile.of(grad))
                mixed = _multiplied(z, factor, stack, part)
                grad_part = _multiplied(z.mT, factor, stack, grad_mixed)
                if factor is None:
                    torch.bmm(grad_mixed, part.mT, out=stack.of(grad_z))
                else:  # Z^-1 is given: its gradient is -Z^T G Z^T, of rank e like G itself
                    torch.bmm(grad_part, mixed.mT, out=stack.of(grad_z)).neg_()
                for tile in queries.tiles(stack):
                    p, grad_p = queries.again(tile), queries.product(mixed, tile.of(grad))
                    if k is None:  # the kernel stands on both sides of Z
                        torch.bmm(p.mT, grad_part, out=tile.of(grad_v))
                        grad_p.baddbmm_(grad_part, tile.of(v).mT)
                    queries.pull_back(grad_p, p, tile)
                for tile in keys.tiles(stack) if k is not None else ():
                    p = keys.fill(tile) if p_k is None else keys.at(tile)
                    torch.bmm(p.mT, grad_part, out=tile.of(grad_v))
                    keys.pull_back(keys.product(grad_part, tile.of(v)), p, tile)

        grad_landmarks = queries.landmark_gradient()
        if k is None:
            return queries.grad_tokens, None, grad_v, grad_landmarks, grad_z, *[None] * 4
        grad_landmarks += keys.landmark_gradient()
        return queries.grad_tokens, keys.grad_tokens, grad_v, grad_landmarks, grad_z, *[None] * 4

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        *tensors, scale, tile_tokens, _ = args
        stacked = (
            None if x is None else mapped_axis_first(x, axis, info.batch_size).flatten(0, 1)
            for x, axis in zip(tensors, in_dims)
        )
        # A mapped backward pass goes through `_plain` and needs no intermediates.
        out, *_ = _Tiled.apply(*stacked, scale, tile_tokens, False)
        return (out.unflatten(0, (info.batch_size, -1)), None, None, None), (0, None, None, None)


def _differentiable_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    landmarks: Tensor,
    z: Tensor,
    factor: Tensor | None,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """The backward pass once more, such that it can be differentiated, mapped and so on."""

    def tied(q: Tensor, v: Tensor, landmarks: Tensor, z: Tensor) -> Tensor:
        return _plain(q, None, v, landmarks, z, factor, scale)

    def untied(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, z: Tensor) -> Tensor:
        return _plain(q, k, v, landmarks, z, factor, scale)

    if k is not None:
        pull_back = torch.func.vjp(untied, q, k, v, landmarks, z)[1]
        return pull_back(grad)
    pull_back = torch.func.vjp(tied, q, v, landmarks, z)[1]
    grad_q, *others = pull_back(grad)
    return grad_q, None, *others


class _Stack(NamedTuple):
    """Some consecutive matrices of the stack: heads of one image."""

    image: int
    head: int
    size: int
    heads: int

    def of(self, tensor: Tensor) -> Tensor:
        """Their part of something with an axis for all matrices."""
        return _part(tensor, 0, self.image * self.heads + self.head, self.size)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """(images, heads, n, d) -> (size, n, d)."""
        return _part(tokens.select(0, self.image), 0, self.head, self.size)


class _Tile(NamedTuple):
    """Some consecutive tokens of some consecutive matrices."""

    stack: _Stack
    first: int
    size: int

    def of(self, tokens: Tensor) -> Tensor:
        """(images, heads, n, d) -> (size of the stack, size of the tile, d)."""
        return _part(self.stack.of_tokens(tokens), 1, self.first, self.size)


def _multiplied(z: Tensor, factor: Tensor | None, stack: _Stack, x: Tensor) -> Tensor:
    """Z x for a part of the stack."""
    if factor is None:
        return stack.of(z) @ x
    return torch.cholesky_solve(x, stack.of(factor))


def _part(tensor: Tensor, dim: int, first: int, size: int) -> Tensor:
    return tensor if size == tensor.shape[dim] else tensor.narrow(dim, first, size)


def _sides(
    q: Tensor,
    k: Tensor | None,
    landmarks: Tensor,
    scale: float,
    tile_tokens: int,
) -> tuple[list[_Stack], "_Side", "_Side"]:
    """The stack in parts, and queries and keys, which are the same object if k is None."""
    images, heads, n = q.shape[:3]
    longest = n if k is None else max(n, k.shape[2])
    # A tile is whole matrices, or a part of a single one.
    spans = _spans(heads, max(1, tile_tokens // longest))
    stacks = [_Stack(image, *span, heads) for image in range(images) for span in spans]
    around = _around(landmarks, scale)
    common = (around, scale, stacks[0].size, tile_tokens)
    queries = _Side(q, *common)
    return stacks, queries, queries if k is None else _Side(k, *common)


class _Far(NamedTuple):
    """Landmarks of one matrix that are too far from the centre for the product."""

    which: Tensor
    """(k,) of the m."""
    landmarks: Tensor
    """(k, d)."""


class _Landmarks(NamedTuple):
    """The landmarks of all matrices, as tokens are compared with them."""

    centre: Tensor
    """(b, 1, d), what is subtracted from tokens."""
    y: Tensor
    """(b, m, d), the landmarks around it."""
    columns: Tensor
    """(b, m, d + 2), the same for the product."""
    far: dict[int, _Far]
    """By matrix; one without far landmarks is not in it."""


def _around(landmarks: Tensor, scale: float) -> _Landmarks:
    centre, (y, norms) = centred(landmarks, scale * TO_BASE_2)
    far, limit = {}, FAR / (scale * TO_BASE_2) ** 2
    for (i,) in far_matrices(norms, limit):
        which = (norms[i, :, 0] > limit).nonzero().flatten()
        far[i] = _Far(which, landmarks[i, which])
    return _Landmarks(centre, y, columns_of((y, norms), scale * TO_BASE_2), far)


def _spans(length: int, most: int) -> list[tuple[int, int]]:
    """(first, size) of consecutive parts, nearly equal, of at most so many."""
    step = math.ceil(length / math.ceil(length / most))
    return [(start, min(step, length - start)) for start in range(0, length, step)]


class _Side:
    """Queries or keys: the kernel between them and the landmarks, and their gradient, in tiles."""

    kept: Tensor | None = None  # (b, m * n), tile after tile, each of them (m, tokens)

    def __init__(
        self, tokens: Tensor, landmarks: _Landmarks, scale: float, group: int, tile_tokens: int
    ) -> None:
        self.tokens, self.landmarks, self.scale = tokens, landmarks, scale
        m, (n, d) = landmarks.y.shape[1], tokens.shape[2:]
        self.spans = _spans(n, tile_tokens)
        # Room for the kernel of one part of the stack, or of one tile only; rows for one tile.
        self.stored = group * m * n * tokens.element_size() <= _STORED_BYTES
        self.values = scratch("kernel", tokens, group, m * (n if self.stored else self.spans[0][1]))
        self.rows = scratch("rows", tokens, group, self.spans[0][1], d + 2)

    def tiles(self, stack: _Stack) -> list[_Tile]:
        return [_Tile(stack, *span) for span in self.spans]

    def keep(self) -> None:
        """Makes room for all of the kernel, unless that is too much."""
        (b, m), n = self.landmarks.y.shape[:2], self.tokens.shape[2]
        if self.kept is None and b * m * n * self.tokens.element_size() <= _STORED_BYTES:
            self.kept = self.tokens.new_empty(b, m * n)

    def prepare_backward(self, kept: Tensor | None) -> None:
        y = self.landmarks.y
        self.kept = kept
        self.grad_tokens = torch.empty_like(self.tokens)
        self.scaled_y = y * self.scale**2
        self.grad_y, self.total_y = torch.zeros_like(y), y.new_zeros(*y.shape[:2], 1)

    def at(self, tile: _Tile) -> Tensor:
        """The memory of the kernel's values, (stack, m, tokens)."""
        stack, m = tile.stack, self.landmarks.y.shape[1]
        if self.kept is not None:
            values = _part(stack.of(self.kept), 1, m * tile.first, m * tile.size)
            return values.view(stack.size, m, tile.size)
        values = _part(self.values, 0, 0, stack.size)
        values = _part(values, 1, m * tile.first if self.stored else 0, m * tile.size)
        return values.view(stack.size, m, tile.size)

    def again(self, tile: _Tile) -> Tensor:
        """The kernel's values, once all tiles of this part of the stack have been filled."""
        return self.at(tile) if self.stored or self.kept is not None else self.fill(tile)

    def fill(self, tile: _Tile) -> Tensor:
        """Computes them: as a product, those of far landmarks from differences."""
        values = self._product_with_columns(tile)
        for i, far, tokens in self._far_of(tile):
            exact = far_kernel(far.landmarks, tokens, self.scale)
            values[i, far.which] = exact.to(values.dtype)
        return values

    def _far_of(self, tile: _Tile) -> list[tuple[int, _Far, Tensor]]:
        """Matrices of the tile with far landmarks: where in the tile, these, the tokens."""
        if not self.landmarks.far:
            return []
        first, tokens = tile.stack.image * tile.stack.heads + tile.stack.head, tile.of(self.tokens)
        found = ((i, self.landmarks.far.get(first + i)) for i in range(tile.stack.size))
        return [(i, far, tokens[i]) for i, far in found if far is not None]

    def _product_with_columns(self, tile: _Tile) -> Tensor:
        """The kernel by a product of rows [x, 1, |x|^2] and the columns.

        The rows' memory is used again by the next tile.
        """
        values, tokens = self.at(tile), tile.of(self.tokens)
        columns = tile.stack.of(self.landmarks.columns)
        if native.takes(tokens):
            centre = tile.stack.of(self.landmarks.centre)
            native.kernel_of_tokens(tokens, centre, columns, values, token_bound(tokens))
            return values
        d = self.tokens.shape[-1]
        rows = _part(_part(self.rows, 0, 0, tile.stack.size), 1, 0, tile.size)
        x, norms = rows.narrow(2, 0, d), rows.select(2, d + 1)
        torch.linalg.vector_norm(self._measure(tile, out=x), dim=-1, out=norms)
        norms.square_()
        rows.select(2, d).fill_(1)
        torch.bmm(columns, rows.mT, out=values)
        return values.clamp_(max=0).exp2_()

    def _measure(self, tile: _Tile, out: Tensor) -> Tensor:
        """The tokens around the centre."""
        bound = token_bound(out)
        torch.sub(tile.of(self.tokens), tile.stack.of(self.landmarks.centre), out=out)
        return out.clamp_(-bound, bound)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """(stack, m, e), (stack, tokens, e) -> (stack, m, tokens), overwritten by the next one."""
        out = scratch("product", left, *left.shape[:2], right.shape[1])
        return torch.bmm(left, right.mT, out=out)

    def pull_back(self, grad_values: Tensor, values: Tensor, tile: _Tile) -> None:
        """Takes the gradient of the values, (stack, m, tokens), to tokens and landmarks.

        k = exp(-scale^2 |x - y|^2 / 2) gives dx = sum of dk k scale^2 (y - x) over y, and
        likewise dy.
        """
        stack, far_of_tile = tile.stack, self._far_of(tile)
        exact = [
            far_gradient([far.landmarks, tokens], grad_values[i, far.which], self.scale)
            for i, far, tokens in far_of_tile
        ]
        weights = grad_values.mul_(values)
        for i, far, _ in far_of_tile:
            weights[i, far.which] = 0
        rows = _part(_part(self.rows, 0, 0, stack.size), 1, 0, tile.size)
        x = self._measure(tile, rows.narrow(2, 0, self.tokens.shape[-1]))
        grad_x = torch.bmm(weights.mT, stack.of(self.scaled_y), out=tile.of(self.grad_tokens))
        grad_x.addcmul_(weights.sum(1).unsqueeze(-1), x, value=-(self.scale**2))
        grad_y = stack.of(self.grad_y).baddbmm_(weights, x)
        stack.of(self.total_y).add_(weights.sum(2, keepdim=True))
        for (i, far, _), (own, grad) in zip(far_of_tile, exact):
            grad_x[i] += grad
            grad_y[i, far.which] += own / self.scale**2

    def landmark_gradient(self) -> Tensor:
        return self.grad_y.addcmul_(self.total_y, self.landmarks.y, value=-1) * self.scale**2
