"""A recorded pass of one attention layer: its tokens, rows of its matrix, its factors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from ..layers.attention import SoftmaxFreeAttention
from ..layers.multihead import Layout, MultiHeadAttention
from ..layers.samplers import Size
from ..ops.precision import without_autocast
from .factors import Factors, factors_of


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """Queries, keys and values of a layer in one forward pass.

    Rows and factors are computed on request, with the layer's current weights. The layer must be in
    evaluation mode: in training some attentions draw at random.
    """

    name: str
    """The layer's place in the model, as in `model.get_submodule(name)`."""
    attention: MultiHeadAttention
    attend: Callable[[Tensor, Tensor, Tensor, Layout], Tensor]
    """The layer's `attend`, without the recording."""
    q: Tensor
    """(B, heads, N, d), as k and v in the type of the weights."""
    k: Tensor
    """(B, heads, L, d); q itself for tied self-attention."""
    v: Tensor
    """(B, heads, L, d)."""
    layout: Layout
    """The grids of queries and keys, after `attention.prefix_tokens`, and the masks."""
    training: bool
    """Whether the layer was in training mode."""

    def factors(self) -> Factors:
        """Computes P, Z and what Z is made of, of SOFT, SOFT++ and softx only."""
        if not isinstance(self.attention, SoftmaxFreeAttention):
            raise UserError(
                f"layer {self.name!r} is {type(self.attention).__name__}, without the factors P, A "
                "and D; SOFT, SOFT++ and softx have them"
            )
        self._check_mode()
        return factors_of(self.attention, self.q, self.k, self.layout)

    def rows(self, queries: Sequence[int], head: int | None = None) -> Tensor:
        """Computes rows of the attention matrix S; a head's result is S v.

        Args:
            queries: Numbers of tokens, the prefix first; `token` and `token_at` find them.
            head: All heads if None.

        Returns:
            (B, heads, len(queries), L) or, of one head, (B, len(queries), L), the prefix first.
            Attentions without factors need `rows_by_gradient`.
        """
        count, heads = self.q.shape[-2], self.q.shape[1]
        for query in queries:
            if not 0 <= query < count:
                raise UserError(
                    f"queries of layer {self.name!r} must be from 0 to {count - 1}, got {query}"
                )
        if head is not None and not 0 <= head < heads:
            raise UserError(
                f"head of layer {self.name!r} must be from 0 to {heads - 1}, got {head}"
            )
        if isinstance(self.attention, SoftmaxFreeAttention):
            rows = self.factors().rows(queries)
        else:
            rows = self.rows_by_gradient(queries)
        return rows if head is None else rows[:, head]

    def rows_by_gradient(self, queries: Sequence[int]) -> Tensor:
        """Computes rows (B, heads, len(queries), L) of any attention.

        Attention is linear in the values and treats their channels alike: the gradient of a
        query's result in one channel, with respect to the values in it, is the query's row. It
        takes one forward pass of `attend`, and a backward pass for each query.
        """
        self._check_mode()
        with torch.inference_mode(False), torch.enable_grad(), without_autocast(self.v):
            q, v = self.q.clone(), self.v.clone().requires_grad_()
            k = q if self.k is self.q else self.k.clone()
            out = self.attend(q, k, v, _cloned(self.layout))
            rows = [
                torch.autograd.grad(out[..., query, 0].sum(), v, retain_graph=True)[0][..., 0]
                for query in queries
            ]
        return torch.stack(rows, -2)

    def token(self, *place: int) -> int:
        """Number of the token at a place of the grid, such as (row, column)."""
        size = self.layout.size
        if len(place) != len(size) or any(not 0 <= i < side for i, side in zip(place, size)):
            raise UserError(
                f"query of layer {self.name!r} must be on its grid of {by(size)} tokens, counted "
                f"from 0, got {place}"
            )
        number = 0
        for i, side in zip(place, size):
            number = number * side + i
        return self.attention.prefix_tokens + number

    def token_at(self, *fractions: float) -> int:
        """Number of the token at a place of the image, (0, 0) to (1, 1), the height first."""
        if any(not 0 <= fraction <= 1 for fraction in fractions):
            raise UserError(f"a place of the image must be between 0 and 1, got {fractions}")
        sides = self.layout.size
        return self.token(*(min(int(f * side), side - 1) for f, side in zip(fractions, sides)))

    def on_grid(self, rows: Tensor) -> Tensor:
        """Rows (..., L) -> maps (..., H, W) of the keys, the prefix left out."""
        size: Size = self.layout.context_size
        prefix = rows.shape[-1] - math.prod(size)
        return rows[..., prefix:].unflatten(-1, size)

    def _check_mode(self) -> None:
        if self.training or self.attention.training:
            raise UserError(
                f"layer {self.name!r} is in training mode, or was when it was recorded, and may "
                "draw at random; call model.eval() before"
            )


def _cloned(layout: Layout) -> Layout:
    """Tensors of inference mode cannot be differentiated through; copies can."""
    mask, query_mask = (x if x is None else x.clone() for x in (layout.mask, layout.query_mask))
    return layout._replace(mask=mask, query_mask=query_mask)


def by(size: Size) -> str:
    """Formats a size, such as 8 x 8."""
    return " x ".join(map(str, size))
