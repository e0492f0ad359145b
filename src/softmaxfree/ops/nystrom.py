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


class Scales(NamedTuple):
    tokens: float
    landmarks: float


def nystrom(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    landmarks: Tensor,
    z: Tensor,
    factor: Tensor | None,
    scales: Scales,
) -> Tensor:
    """P_q Z P_k^T V for stacks of matrices, b = images * heads of them.

    Args:
        q: (images, heads, n, d) queries, in any order of memory.
        k: (images, heads, l, d) keys, or None if they are the queries.
        v: (images, heads, l, e) values.
        landmarks: (b, m, d).
        z: (b, m, m), Z itself; where its factor is given, the inverse of Z.
        factor: (b, m, m), lower Cholesky factor of the inverse of Z, which need not be formed then.
        scales: What tokens and landmarks are multiplied with before they are compared.

    Returns:
        (images, heads, n, e).
    """
    if torch.compiler.is_compiling():
        return _plain(q, k, v, landmarks, z, factor, scales)
    tensors = (q, k, v, landmarks, z, factor)
    tiled = _Tiled.apply if needs_apply(*tensors) else _Tiled.forward
    tile_tokens, keep = _tile_tokens(q, k, landmarks), needs_gradient(*tensors)
    return tiled(*tensors, scales, tile_tokens, keep)[0]


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
    scales: Scales,
) -> Tensor:
    with without_autocast(q):
        if factor is not None:
            z = inverse_of_definite(z)
        shift, centres = centred(landmarks, scales.landmarks * TO_BASE_2)

        def kernel(tokens: Tensor) -> Tensor:
            x = measured(tokens.flatten(0, 1), shift, scales.tokens * TO_BASE_2)
            return exponents_of(centres, x).clamp(max=0).exp2()  # (b, m, n)

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
        scales: Scales,
        tile_tokens: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        with without_autocast(q):
            stacks, queries, keys = _sides(q, k, landmarks, scales, tile_tokens)
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
        *tensors, ctx.scales, ctx.tile_tokens, _ = inputs
        _, *intermediates = output
        ctx.mark_non_differentiable(*(x for x in intermediates if x is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *intermediates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        q, k, v, landmarks, z, factor, summary, p_q, p_k = ctx.saved_tensors
        scales = ctx.scales
        if torch.is_grad_enabled() or summary is None:
            inputs = (q, k, v, landmarks, z, factor, scales)
            return *_differentiable_gradient(grad, *inputs), *[None] * 4

        with without_autocast(q):
            stacks, queries, keys = _sides(q, k, landmarks, scales, ctx.tile_tokens)
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
        *tensors, scales, tile_tokens, _ = args
        stacked = (
            None if x is None else mapped_axis_first(x, axis, info.batch_size).flatten(0, 1)
            for x, axis in zip(tensors, in_dims)
        )
        # A mapped backward pass goes through `_plain` and needs no intermediates.
        out, *_ = _Tiled.apply(*stacked, scales, tile_tokens, False)
        return (out.unflatten(0, (info.batch_size, -1)), None, None, None), (0, None, None, None)


def _differentiable_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    landmarks: Tensor,
    z: Tensor,
    factor: Tensor | None,
    scales: Scales,
) -> tuple[Tensor | None, ...]:
    """The backward pass once more, such that it can be differentiated, mapped and so on."""

    def tied(q: Tensor, v: Tensor, landmarks: Tensor, z: Tensor) -> Tensor:
        return _plain(q, None, v, landmarks, z, factor, scales)

    def untied(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, z: Tensor) -> Tensor:
        return _plain(q, k, v, landmarks, z, factor, scales)

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
    scales: Scales,
    tile_tokens: int,
) -> tuple[list[_Stack], "_Side", "_Side"]:
    """The stack in parts, and queries and keys, which are the same object if k is None."""
    images, heads, n = q.shape[:3]
    longest = n if k is None else max(n, k.shape[2])
    # A tile is whole matrices, or a part of a single one.
    spans = _spans(heads, max(1, tile_tokens // longest))
    stacks = [_Stack(image, *span, heads) for image in range(images) for span in spans]
    shift, centres = centred(landmarks, scales.landmarks * TO_BASE_2)
    far = _far_landmarks(landmarks, centres[1], scales)
    common = (shift, columns_of(centres), far, scales, stacks[0].size, tile_tokens)
    queries = _Side(q, *common)
    return stacks, queries, queries if k is None else _Side(k, *common)


class _Far(NamedTuple):
    """Landmarks of one matrix that are too far from the centre for the product."""

    which: Tensor
    """(k,), which of the m they are."""
    landmarks: Tensor
    """(k, d), on the tokens' scale, in float64."""


def _far_landmarks(landmarks: Tensor, norms: Tensor, scales: Scales) -> dict[int, _Far]:
    """By matrix; one without such landmarks is not in it."""
    found = {}
    for (i,) in far_matrices(norms, FAR):
        index = (norms[i, :, 0] > FAR).nonzero().flatten()
        far = landmarks[i, index].double() * (scales.landmarks / scales.tokens)
        found[i] = _Far(index, far)
    return found


def _spans(length: int, most: int) -> list[tuple[int, int]]:
    """(first, size) of consecutive parts, nearly equal, of at most so many."""
    step = math.ceil(length / math.ceil(length / most))
    return [(start, min(step, length - start)) for start in range(0, length, step)]


class _Side:
    """Queries or keys: the kernel between them and the landmarks, and their gradient, in tiles."""

    kept: Tensor | None = None  # (b, m * n), tile after tile, each of them (m, tokens)

    def __init__(
        self,
        tokens: Tensor,
        shift: Tensor,
        columns: Tensor,
        far: dict[int, _Far],
        scales: Scales,
        group: int,
        tile_tokens: int,
    ) -> None:
        self.tokens, self.shift, self.columns, self.scales = tokens, shift, columns, scales
        self.far = far
        m, (n, d) = columns.shape[1], tokens.shape[2:]
        self.spans = _spans(n, tile_tokens)
        # Room for the kernel of one part of the stack, or of one tile only; rows for one tile.
        self.stored = group * m * n * tokens.element_size() <= _STORED_BYTES
        self.values = scratch("kernel", tokens, group, m * (n if self.stored else self.spans[0][1]))
        self.rows = scratch("rows", tokens, group, self.spans[0][1], d + 2)

    def tiles(self, stack: _Stack) -> list[_Tile]:
        return [_Tile(stack, *span) for span in self.spans]

    def keep(self) -> None:
        """Makes room for all of the kernel, unless that is too much."""
        (b, m), n = self.columns.shape[:2], self.tokens.shape[2]
        if self.kept is None and b * m * n * self.tokens.element_size() <= _STORED_BYTES:
            self.kept = self.tokens.new_empty(b, m * n)

    def prepare_backward(self, kept: Tensor | None) -> None:
        d = self.tokens.shape[-1]
        self.kept = kept
        self.grad_tokens = torch.empty_like(self.tokens)
        self.y = self.columns[..., :d].contiguous()
        self.scaled_y = self.y * (self.scales.tokens / TO_BASE_2)
        self.grad_y, self.total_y = torch.zeros_like(self.y), self.y.new_zeros(*self.y.shape[:2], 1)
        self.grad_far = {i: torch.zeros_like(far.landmarks) for i, far in self.far.items()}

    def at(self, tile: _Tile) -> Tensor:
        """The memory of the kernel's values, (stack, m, tokens)."""
        stack, m = tile.stack, self.columns.shape[1]
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
        for i, matrix, tokens in self._far_of(tile):
            index, landmarks = self.far[matrix]
            values[i, index] = far_kernel(landmarks, tokens, self.scales.tokens).to(values.dtype)
        return values

    def _far_of(self, tile: _Tile) -> list[tuple[int, int, Tensor]]:
        """Matrices of the tile that have far landmarks: where in the tile, which, their tokens."""
        if not self.far:
            return []
        first, tokens = tile.stack.image * tile.stack.heads + tile.stack.head, tile.of(self.tokens)
        places = range(tile.stack.size)
        return [(i, first + i, tokens[i]) for i in places if first + i in self.far]

    def _product_with_columns(self, tile: _Tile) -> Tensor:
        """The kernel by a product of rows [x, 1, |x|^2] and the columns.

        The rows' memory is used again by the next tile.
        """
        values, tokens = self.at(tile), tile.of(self.tokens)
        if native.takes(tokens):
            shift, columns = tile.stack.of(self.shift), tile.stack.of(self.columns)
            scale = self.scales.tokens * TO_BASE_2
            native.kernel_of_tokens(tokens, shift, columns, values, scale, token_bound(tokens))
            return values
        d = self.tokens.shape[-1]
        rows = _part(_part(self.rows, 0, 0, tile.stack.size), 1, 0, tile.size)
        x, norms = rows.narrow(2, 0, d), rows.select(2, d + 1)
        torch.linalg.vector_norm(self._measure(tile, out=x), dim=-1, out=norms)
        norms.square_()
        rows.select(2, d).fill_(1)
        torch.bmm(tile.stack.of(self.columns), rows.mT, out=values)
        return values.clamp_(max=0).exp2_()

    def _measure(self, tile: _Tile, out: Tensor) -> Tensor:
        """The tokens, scaled and shifted."""
        bound, scale = token_bound(out), self.scales.tokens * TO_BASE_2
        torch.add(tile.stack.of(self.shift), tile.of(self.tokens), alpha=scale, out=out)
        return out.clamp_(-bound, bound)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """(stack, m, e), (stack, tokens, e) -> (stack, m, tokens), overwritten by the next one."""
        out = scratch("product", left, *left.shape[:2], right.shape[1])
        return torch.bmm(left, right.mT, out=out)

    def pull_back(self, grad_values: Tensor, values: Tensor, tile: _Tile) -> None:
        """Takes the gradient of the values, (stack, m, tokens), to tokens and landmarks.

        k = 2^(-|x - y|^2 / 2) gives dx = sum of dk k (y - x) over y, and likewise dy.
        """
        stack = tile.stack
        far = []
        for i, matrix, tokens in self._far_of(tile):
            far.append((i, *self._pull_back_far(grad_values[i], matrix, tokens)))
        weights = grad_values.mul_(values)
        for i, index, _ in far:
            weights[i, index] = 0
        rows = _part(_part(self.rows, 0, 0, stack.size), 1, 0, tile.size)
        x = self._measure(tile, rows.narrow(2, 0, self.tokens.shape[-1]))
        grad_x = torch.bmm(weights.mT, stack.of(self.scaled_y), out=tile.of(self.grad_tokens))
        grad_x.addcmul_(weights.sum(1).unsqueeze(-1), x, value=-self.scales.tokens / TO_BASE_2)
        for i, _, grad in far:
            grad_x[i] += grad
        stack.of(self.grad_y).baddbmm_(weights, x)
        stack.of(self.total_y).add_(weights.sum(2, keepdim=True))

    def _pull_back_far(
        self, grad_values: Tensor, matrix: int, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which landmarks of a matrix are far, and the gradient of their values at the tokens."""
        index, landmarks = self.far[matrix]
        grad, grad_tokens = far_gradient(
            [landmarks, tokens], grad_values[index], self.scales.tokens
        )
        self.grad_far[matrix] += grad
        return index, grad_tokens

    def landmark_gradient(self) -> Tensor:
        """Of the landmarks as they were given, (b, m, d)."""
        grad = self.grad_y.addcmul_(self.total_y, self.y, value=-1)
        grad *= self.scales.landmarks / TO_BASE_2
        for matrix, own in self.grad_far.items():
            ratio = self.scales.landmarks / self.scales.tokens
            grad[matrix, self.far[matrix].which] = (own * ratio).to(grad.dtype)
        return grad
