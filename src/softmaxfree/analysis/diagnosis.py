"""The health of softmax-free attention: condition numbers, spectral norms, residuals, agreement.

SOFT sums over tokens, and a larger image has more of them. Attention among the landmarks, A Z A,
shows the effect: for SOFT its spectral norm is |A|, between 1 and m, and a model trained at one
resolution fails at another (the paper: 82.5 % at 224 pixels, 33.7 % at 384, 0.14 % at 512). SOFT++
divides by the row sums: its norm is about 1 at all resolutions. That alone does not keep a model
accurate: SOFT++ trained at one size fails at others too. The classes of the same images at both
sizes show it (the table in docs/figures.md).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..layers.attention import SoftmaxFreeAttention
from ..models.backbone import Backbone, PositionEmbedding, pair
from ..models.weights import find_weights
from ..ops.checks import check_floating, shape
from .attention_record import AttentionRecord, by
from .hooks import evaluating, recorded_attention
from .measures import Measures, measures_of

MOST_GROWTH = 2.0
"""Warn if |A Z A| differs from its value at the trained size by more than this factor. In nano
models, trained and not, SOFT exceeds it in some layers at 1.5 times the side; SOFT++ stays below
1.5 at 3 times the side."""

LEAST_AGREEMENT = 0.9
"""Warn if a smaller share of the images keeps the class that it has at the trained size. With the
weights of the package, at 1.5 to 4 times the side, accuracy was this share to 5 points."""

MOST_RESIDUAL = 1e-2
"""Warn if |B X B - B| / |B| of a computed inverse X of B is larger."""

_NAME = 28
"""Columns of a layer's name in a table."""


class Spread(NamedTuple):
    """Mean and maximum over all images and heads."""

    mean: float
    max: float


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer of softmax-free attention, S = P Z P^T with Z = A^+ or D^-1/2 A^+ D^-1/2."""

    name: str
    normalize: bool
    """SOFT++ if true, SOFT if not."""
    tokens: int
    """n, the rows of S."""
    num_landmarks: int
    """m, the rows of A."""
    eigenvalues: tuple[float, float]
    """The smallest and the largest of A, of all images and heads."""
    condition: Spread
    """Condition number of A."""
    ridged_condition: Spread
    """Condition number of A plus the layer's ridge, the matrix that is inverted."""
    inverse_norm: Spread
    """|A^+|, the spectral norm of the inverse as the layer computes it."""
    middle_norm: Spread
    """|Z|; for SOFT the same as |A^+|."""
    landmark_attention_norm: Spread
    """|A Z A|, the norm of attention among the landmarks."""
    norm: Spread
    """|S|."""
    residual: Spread
    """|B X B - B| / |B| of the inverse X that the layer computes, with B = A plus its ridge, in
    Frobenius norms."""
    growth: float | None
    """Mean |A Z A| divided by its value at the trained size; None if that size is unknown."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`; prints as a table of the largest values."""

    size: tuple[int, int]
    """(height, width) of the images."""
    trained_size: tuple[int, int] | None
    """Size of the images in training; None if it is unknown."""
    agreement: float | None
    """Share of the images that keep their most probable class when they are resized to the trained
    size; None if that size is unknown, or the model gives no logits (B, classes)."""
    layers: tuple[LayerDiagnosis, ...]
    """In the order in which they ran."""
    warnings: tuple[str, ...]
    """One sentence for each problem."""

    def __str__(self) -> str:
        trained = "an unknown size" if self.trained_size is None else by(self.trained_size)
        lines = [
            f"images of {by(self.size)} pixels, model trained at {trained}{self._agreement()}",
            _line("layer", *_COLUMNS),
            *(_line(layer.name, *(cell(layer) for cell in _COLUMNS.values()))
              for layer in self.layers),
            *(f"warning: {sentence}" for sentence in self.warnings),
        ]  # fmt: skip
        return "\n".join(lines)

    def _agreement(self) -> str:
        if self.agreement is None or self.size == self.trained_size:
            return ""
        return f"; the same class at both for {self.agreement:.0%}".replace("%", " % of them")


_COLUMNS: dict[str, Callable[[LayerDiagnosis], str]] = {
    "n": lambda layer: str(layer.tokens),
    "m": lambda layer: str(layer.num_landmarks),
    "cond A": lambda layer: f"{layer.condition.max:.3g}",
    "|A^+|": lambda layer: f"{layer.inverse_norm.max:.3g}",
    "|Z|": lambda layer: f"{layer.middle_norm.max:.3g}",
    "|AZA|": lambda layer: f"{layer.landmark_attention_norm.max:.3g}",
    "growth": lambda layer: "" if layer.growth is None else f"{layer.growth:.3g}",
    "|S|": lambda layer: f"{layer.norm.max:.3g}",
    "residual": lambda layer: f"{layer.residual.max:.1e}",
}
"""Columns of the table, and what they show of a layer."""


def diagnose(
    model: nn.Module | str | Path,
    images: Tensor,
    trained_size: int | Sequence[int] | None = None,
) -> Diagnosis:
    """Measures condition numbers, norms and residuals of softmax-free attention on images.

        print(diagnose(model, images))

    It warns, in the result and once by a `UserWarning`, if values are not finite, if images get
    another class, or A Z A another norm, than at the resolution of training (the same images are
    resized for the comparison), and if a computed inverse has a large residual. It cannot tell
    whether the classes at the trained size are right, nor how a model without logits does.

    Args:
        model: With SOFT or SOFT++ in some of its layers, run in evaluation mode; or trained weights
            as `softmaxfree.models.weights.find_weights` takes them, such as softpp_nano.cifar10.
        images: (B, channels, H, W), normalised as the model expects them; some dozens of them show
            whether classes change.
        trained_size: Side, or (height, width), of the images the model was trained with; if not
            given, the size that its position embeddings are for.

    Returns:
        A `Diagnosis`, computed in float64 from the matrices of the layers.
    """
    if not isinstance(model, nn.Module):
        model = find_weights(model).build()
    check_floating(images=images)
    if images.ndim != 4 or images.numel() == 0:
        raise UserError(f"images must be (B, channels, H, W), got shape {shape(images)}")
    if not any(isinstance(module, SoftmaxFreeAttention) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__} has no softmax-free attention to diagnose; pass a model with "
            "SOFT or SOFT++"
        )
    size = pair(images.shape[-2:], "images")
    trained = _trained_size(model) if trained_size is None else pair(trained_size, "trained_size")
    with evaluating(model):
        measured, classes = _measure(model, images)
        usual, usual_classes = measured, classes
        if trained not in (None, size):
            resized = F.interpolate(images, trained, mode="bilinear", antialias=True)
            usual, usual_classes = _measure(model, resized)
    agreement = None
    if trained is None:
        usual = {}
    elif classes is not None and usual_classes is not None:
        agreement = (classes == usual_classes).float().mean().item()
    layers = tuple(_summary(layer, usual.get(name)) for name, layer in measured.items())
    sentences = (
        *_not_finite(layers),
        *_other_classes(agreement, size, trained),
        *_resolution(layers, size, trained),
        *_no_inverse(layers),
    )  # fmt: skip
    if sentences:
        warnings.warn(sentences[0], UserWarning, stacklevel=2)
    return Diagnosis(size, trained, agreement, layers, sentences)


class _Measured(NamedTuple):
    record: AttentionRecord
    """The layer's pass of the last image."""
    measures: Measures


def _measure(model: nn.Module, images: Tensor) -> tuple[dict[str, _Measured], Tensor | None]:
    """Measures layers by name, one image at a time: factors in float64 take much memory.

    Returns:
        The layers, and the most probable classes (B), None if the model gives no logits.
    """
    found: dict[str, _Measured] = {}
    classes: list[Tensor] = []
    for image in images.split(1):
        with recorded_attention(model) as layers:
            logits = model(image)
        if isinstance(logits, Tensor) and logits.ndim == 2:
            classes.append(logits.argmax(1))
        for name, record in layers.items():
            if isinstance(record.attention, SoftmaxFreeAttention):
                measures = measures_of(record.attention, record.factors().double())
                if name in found:
                    both = zip(found[name].measures, measures)
                    measures = Measures(*(torch.cat(of_both) for of_both in both))
                found[name] = _Measured(record, measures)
    return found, torch.cat(classes) if classes else None


def _summary(layer: _Measured, usual: _Measured | None) -> LayerDiagnosis:
    """Summarises a layer, compared with itself at the trained size."""
    record, measures = layer.record, layer.measures
    assert isinstance(record.attention, SoftmaxFreeAttention)
    numbers = measures._asdict()
    eigenvalues = numbers.pop("eigenvalues")
    return LayerDiagnosis(
        name=record.name,
        normalize=record.attention.normalize,
        tokens=record.q.shape[-2],
        num_landmarks=eigenvalues.shape[-1],
        eigenvalues=(eigenvalues.min().item(), eigenvalues.max().item()),
        growth=None if usual is None else (_mean_norm(layer) / _mean_norm(usual)).item(),
        **{name: Spread(x.mean().item(), x.max().item()) for name, x in numbers.items()},
    )


def _mean_norm(layer: _Measured) -> Tensor:
    return layer.measures.landmark_attention_norm.mean()


def _trained_size(model: nn.Module) -> tuple[int, int] | None:
    """The image size that the position embeddings of a model, or of its backbone, are for."""
    for module in model.modules():
        if isinstance(module, Backbone):
            info: Any = module.feature_info
            first = next(part for part in module.modules() if isinstance(part, PositionEmbedding))
            height, width = first.grid.shape[1:3]
            return height * info[0]["reduction"], width * info[0]["reduction"]
        size = getattr(getattr(module, "patch_embed", None), "img_size", None)  # timm's
        if size is not None:
            return pair(size, "img_size")
    return None


def _not_finite(layers: Sequence[LayerDiagnosis]) -> Iterator[str]:
    for layer in layers:
        spreads = (layer.inverse_norm, layer.middle_norm, layer.norm, layer.residual)
        if not all(math.isfinite(spread.max) for spread in spreads):
            yield (
                f"attention is not finite in layer {layer.name!r}, the first to fail: look for "
                "images or weights that are not, or for an inverse that diverges"
            )
            return


def _other_classes(
    agreement: float | None, size: tuple[int, int], trained: tuple[int, int] | None
) -> Iterator[str]:
    if trained is not None and agreement is not None and agreement < LEAST_AGREEMENT:
        share = f"{1 - agreement:.0%}".replace("%", " %")
        yield (
            f"at {by(size)} pixels {share} of the images get another class than at {by(trained)}, "
            "where the model was trained: expect accuracy to be lower by about as much"
        )


def _resolution(
    layers: Sequence[LayerDiagnosis], size: tuple[int, int], trained: tuple[int, int] | None
) -> Iterator[str]:
    outside = [
        (layer.growth, layer.normalize)
        for layer in layers
        if layer.growth is not None and _leaves_range(layer.growth)
    ]
    if trained is None or not outside:
        return
    growths, normalized = zip(*outside)
    reason = "" if all(normalized) else ", as SOFT is not normalised"
    yield (
        f"at {by(size)} pixels attention is {min(growths):.2g} to {max(growths):.2g} times as "
        f"strong as at {by(trained)}, where the model was trained, in {len(outside)} of "
        f"{len(layers)} layers (by |A Z A|): results may collapse{reason}"
    )


def _leaves_range(growth: float) -> bool:
    return growth > MOST_GROWTH or growth < 1 / MOST_GROWTH


def _no_inverse(layers: Sequence[LayerDiagnosis]) -> Iterator[str]:
    worst = max(layers, key=lambda layer: layer.residual.max, default=None)
    if worst is not None and worst.residual.max > MOST_RESIDUAL:
        yield (
            f"the inverse in layer {worst.name!r} leaves a residual |B X B - B| / |B| of "
            f"{worst.residual.max:.1g}, more than {MOST_RESIDUAL:g}: take more iters, a ridge, or "
            "inverse='auto'"
        )


def _line(name: str, *cells: str) -> str:
    """A line of the table, 97 columns."""
    shown = name if len(name) <= _NAME else "..." + name[3 - _NAME :]
    widths = (6, 5, 9, 8, 8, 8, 8, 8, 9)
    return f"{shown:{_NAME}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths))
