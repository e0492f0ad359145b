"""What a patch attends to in every layer and head, as the layers compute it or as they might."""

import math
from collections.abc import Hashable
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..analysis.diagnosis import MOST_GROWTH
from ..analysis.factors import Factors
from ..analysis.record import AttentionRecord
from ..errors import UserError
from ..figures.newton import METHODS, residual
from ..layers.attention import SoftmaxFreeAttention
from ..layers.samplers import AvgSampler, RandomSampler
from ..ops.inverse import INVERSES, add_ridge, check_inverse, eigenvalues
from .looks import Kept, Look, distinct_bytes

MOST_WEIGHTS = 200_000_000
"""Of all heads of a layer that is quadratic in its tokens; their rows then take 2 GB."""

STEPS = (1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25, 30)
"""Of the iterations whose residuals are shown."""

Place = tuple[float, float]
"""Of the image, (0, 0) to (1, 1), the height first."""


class WhatIf(NamedTuple):
    """Settings of softmax-free attention other than those it was trained with; None for those."""

    inverse: str | None = None
    iters: int | None = None
    normalize: bool | None = None

    def __str__(self) -> str:
        """As in newton, 3 steps, SOFT; empty if all is as trained."""
        parts = [] if self.inverse is None else [self.inverse]
        if self.iters is not None:
            parts.append(f"{self.iters} step{'s' * (self.iters != 1)}")
        if self.normalize is not None:
            parts.append("normalised as SOFT++" if self.normalize else "not normalised, as SOFT")
        return ", ".join(parts)


AS_TRAINED = WhatIf()


class Attended(NamedTuple):
    """What a patch attends to in one layer."""

    maps: Tensor
    """(heads, H, W) of the keys: rows of the attention matrices."""
    cell: tuple[float, float, float, float]
    """The patch in units of the image: top, left, bottom, right."""
    nearness: Tensor | None
    """(heads, m), the kernel of the patch and the bottleneck tokens; None if there are none."""


def is_softmax_free(record: AttentionRecord) -> bool:
    return isinstance(record.attention, SoftmaxFreeAttention)


def supposed(record: AttentionRecord, what_if: WhatIf) -> AttentionRecord:
    """The record of a layer with other settings; the layer itself stays as it is.

    An attention that is not softmax-free has none of them, and its record is returned. Another
    inverse comes with its own ridge.
    """
    attention = record.attention
    if not isinstance(attention, SoftmaxFreeAttention) or what_if == AS_TRAINED:
        return record
    other = copy(attention)
    if what_if.inverse is not None:
        other.inverse, other.ridge = what_if.inverse, None
    if what_if.iters is not None:
        other.iters = what_if.iters
    if what_if.normalize is not None:
        other.normalize = what_if.normalize
    return replace(record, attention=other)


class Rows:
    """Attention rows of looks; the factors that they are products of are kept."""

    def __init__(self) -> None:
        self._kept: Kept[Factors] = Kept()

    def factors(self, look: Look, layer: int, what_if: WhatIf = AS_TRAINED) -> Factors:
        """Of a layer with SOFT or SOFT++."""
        key: Hashable = (look.key, layer, what_if)
        found = None if look.key is None else self._kept.get(key)
        if found is None:
            found = supposed(look.layers[layer], what_if).factors()
            self._kept.put(key, found, distinct_bytes(found))
        return found

    def at(self, look: Look, layer: int, place: Place, what_if: WhatIf = AS_TRAINED) -> Attended:
        record = look.layers[layer]
        token = record.token_at(*place)
        if is_softmax_free(record):
            factors = self.factors(look, layer, what_if)
            rows, nearness = factors.rows([token]), factors.P[0, :, token]
        else:
            _check_weights(record)
            rows, nearness = record.rows([token]), None
        return Attended(record.on_grid(rows[0].squeeze(-2)), _cell(record, token), nearness)


def _check_weights(record: AttentionRecord) -> None:
    heads, queries, keys = record.q.shape[1], record.q.shape[-2], record.k.shape[-2]
    if not record.attention.linear and heads * queries * keys > MOST_WEIGHTS:
        raise UserError(
            f"{queries:,} tokens in layer {record.name!r} are too many for rows of attention with "
            "all of its weights: choose a lower resolution"
        )


def _cell(record: AttentionRecord, token: int) -> tuple[float, float, float, float]:
    height, width = record.layout.size
    row, column = divmod(token - record.attention.prefix_tokens, width)
    return row / height, column / width, (row + 1) / height, (column + 1) / width


class Bottleneck(NamedTuple):
    """Where the bottleneck tokens of a layer come from, in units of the image."""

    rows: tuple[float, ...]
    """Edges of the windows from top to bottom, 0 and 1 with them; none for single tokens."""
    columns: tuple[float, ...]
    """From left to right."""
    points: tuple[Place, ...]
    """Single tokens that were picked; none for windows."""

    @property
    def tokens(self) -> int:
        return len(self.points) or (len(self.rows) - 1) * (len(self.columns) - 1)


def bottleneck_of(record: AttentionRecord) -> Bottleneck | None:
    """None for attentions that are not softmax-free, which have none or make it otherwise."""
    attention = record.attention
    if not isinstance(attention, SoftmaxFreeAttention):
        return None
    sampler, size = attention.sampler, record.layout.size
    height, width = size
    if isinstance(sampler, RandomSampler):
        order = sampler.order(size, torch.device("cpu"))
        picked = order.topk(sampler.count(size), largest=False).indices.tolist()
        return Bottleneck(
            (), (), tuple(((n // width + 0.5) / height, (n % width + 0.5) / width) for n in picked)
        )
    windows = size if isinstance(sampler, AvgSampler) and sampler.tokens else sampler.grid(size)
    counts = windows if sampler.tokens is None else sampler.bins(windows)
    rows, columns = (
        tuple(
            # Windows that stick out of the image end with it.
            min(i * number / count * (1 if windows == size else sampler.ratio) / side, 1.0)
            for i in range(count + 1)
        )
        for side, number, count in zip(size, windows, counts)
    )
    return Bottleneck(rows, columns, ())


class Convergence(NamedTuple):
    """How far from an inverse the methods are, |B X B - B| / |B| with B = A plus a ridge."""

    m: int
    curves: dict[str, list[float]]
    """By iterative method, after `STEPS` steps."""
    own: float
    """Of the inverse that the layer computes."""
    method: str
    """The layer's."""
    iters: int
    """The layer's; methods that factorise take none."""


ITERATIVE = tuple(method for method, (_, _, line) in METHODS.items() if line != ":")


def convergence_of(record: AttentionRecord, factors: Factors, head: int) -> Convergence:
    """Of one head, in the type that the layer computes in.

    Args:
        record: Of the layer, with the settings that are asked about.
        factors: Its own.
        head: Counted from 0.
    """
    attention = record.attention
    assert isinstance(attention, SoftmaxFreeAttention)
    a = factors.A[0, head]
    curves = {}
    for method in ITERATIVE:
        ridge = check_inverse(method, 1, None)
        if method == attention.inverse:
            ridge = check_inverse(method, 1, attention.ridge)
        inverted = add_ridge(a, ridge)
        with torch.no_grad():
            curves[method] = [
                residual(inverted, INVERSES[method](a, steps, ridge)).item() for steps in STEPS
            ]
    ridge = check_inverse(attention.inverse, attention.iters, attention.ridge)
    own = residual(add_ridge(a, ridge), factors.A_inverse[0, head]).item()
    return Convergence(a.shape[-1], curves, own, attention.inverse, attention.iters)


def strengths(rows: Rows, look: Look) -> list[float]:
    """|A Z A| of every softmax-free layer, the mean of its heads, see `diagnose`."""
    found = []
    for layer, record in enumerate(look.layers):
        if is_softmax_free(record):
            factors = rows.factors(look, layer)
            product = factors.A @ factors.Z @ factors.A
            if not product.isfinite().all():
                found.append(math.inf)
                continue
            found.append(eigenvalues(product).abs().amax(-1).mean().item())
    return found


def resolution_warning(rows: Rows, look: Look, trained: Look) -> str:
    """A sentence where attention is much stronger or weaker than at the trained size, or none."""
    growths = [now / before for now, before in zip(strengths(rows, look), strengths(rows, trained))]
    outside = [
        growth
        for growth in growths
        if not (math.isfinite(growth) and 1 / MOST_GROWTH <= growth <= MOST_GROWTH)
    ]
    if not outside:
        return ""
    return (
        f"At {look.side} pixels attention is {min(outside):.2g} to {max(outside):.2g} times as "
        f"strong as at {trained.side}, where the model was trained, in {len(outside)} of "
        f"{len(growths)} layers (by |A Z A|): do not trust the prediction."
    )
