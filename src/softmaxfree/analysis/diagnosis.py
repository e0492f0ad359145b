"""The health of attention: what it passes, condition numbers, norms, residuals, agreement.

An attention can be switched off: a trained model may have learned to do without it, and whatever is
varied in it then shows nothing. The magnitude of S v relative to that of v tells (the table in
docs/method.md).

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

LEAST_PASSED = 0.1
"""An attention that passes less of its values' magnitude counts as switched off."""

_NAME = 28
"""Columns of a layer's name in a table."""


class Spread(NamedTuple):
    """Mean and maximum over all images and heads."""

    mean: float
    max: float


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer of attention; a head's result is S v.

    What an attention does not have is None: SOFT and SOFT++, S = P Z P^T with Z = A^+ or
    D^-1/2 A^+ D^-1/2, have all of it, softx has no inverse, others no landmarks.
    """

    name: str
    tokens: int
    """n, the rows of S."""
    passes: Spread
    """|S v| / |v|, root mean squares over tokens and channels: the attention alone, before the
    value convolution, the gate and the projection."""
    unevenness: Spread
    """How far rows of S are from uniform: the total variation distance between |row|, divided by
    its sum, and equal weights, the mean over 16 rows. 0 if all weights are equal, 1 - 1 / n if one
    key has all of it."""
    num_landmarks: int | None = None
    """m, the columns of P."""
    norm: Spread | None = None
    """|S|."""
    normalize: bool | None = None
    """SOFT++ if true, SOFT if not."""
    eigenvalues: tuple[float, float] | None = None
    """The smallest and the largest of A, of all images and heads."""
    condition: Spread | None = None
    """Condition number of A."""
    ridged_condition: Spread | None = None
    """Condition number of A plus the layer's ridge, the matrix that is inverted."""
    inverse_norm: Spread | None = None
    """|A^+|, the spectral norm of the inverse as the layer computes it."""
    middle_norm: Spread | None = None
    """|Z|; for SOFT the same as |A^+|."""
    landmark_attention_norm: Spread | None = None
    """|A Z A|, the norm of attention among the landmarks; None if rows are divided by sums."""
    residual: Spread | None = None
    """|B X B - B| / |B| of the inverse X that the layer computes, with B = A plus its ridge, in
    Frobenius norms."""
    growth: float | None = None
    """Mean |A Z A| divided by its value at the trained size; None if that size is unknown."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`; prints as a table: means of the columns "passes"
    and "uneven", the largest values of the others."""

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
        columns = [
            [f"{text:>{width}}" for text in (title, *map(show, self.layers))]
            for title, (width, show) in _COLUMNS.items()
            if any(map(show, self.layers))
        ]
        names = [f"{_shown(name):{_NAME}}" for name in ("layer", *(x.name for x in self.layers))]
        lines = [
            f"images of {by(self.size)} pixels, model trained at {trained}{self._agreement()}",
            *("".join(cells) for cells in zip(names, *columns)),
            *(f"warning: {sentence}" for sentence in self.warnings),
        ]
        return "\n".join(lines)

    def _agreement(self) -> str:
        if self.agreement is None or self.size == self.trained_size:
            return ""
        return f"; the same class at both for {self.agreement:.0%}".replace("%", " % of them")


_COLUMNS: dict[str, tuple[int, Callable[[LayerDiagnosis], str]]] = {
    "n": (6, lambda layer: str(layer.tokens)),
    "m": (5, lambda layer: str(layer.num_landmarks or "")),
    "passes": (8, lambda layer: f"{layer.passes.mean:.3f}"),
    "uneven": (8, lambda layer: f"{layer.unevenness.mean:.3f}"),
    "|S|": (8, lambda layer: _largest(layer.norm)),
    "cond A": (9, lambda layer: _largest(layer.condition)),
    "|AZA|": (8, lambda layer: _largest(layer.landmark_attention_norm)),
    "growth": (8, lambda layer: "" if layer.growth is None else f"{layer.growth:.3g}"),
    "residual": (9, lambda layer: _largest(layer.residual, ".1e")),
}
"""Columns of the table, their widths, and what they show of a layer; one that shows nothing of any
layer is left out. The widest table has 97 columns."""


def _shown(name: str) -> str:
    return name if len(name) <= _NAME else "..." + name[3 - _NAME :]


def _largest(spread: Spread | None, digits: str = ".3g") -> str:
    return "" if spread is None else format(spread.max, digits)


def diagnose(
    model: nn.Module | str | Path,
    images: Tensor,
    trained_size: int | Sequence[int] | None = None,
) -> Diagnosis:
    """Measures what every attention of a model makes of images, and whether it is sound.

        print(diagnose(model, images))

    It warns, in the result and once by a `UserWarning`, if values are not finite, if images get
    another class, or A Z A another norm, than at the resolution of training (the same images are
    resized for the comparison), if a computed inverse has a large residual, and if an attention is
    switched off: it passes less than a tenth of its values' magnitude. It cannot tell whether the
    classes at the trained size are right, nor how a model without logits does.

    Args:
        model: With attentions of this package, run in evaluation mode; or trained weights as
            `softmaxfree.models.weights.find_weights` takes them, such as softpp_nano.cifar10.
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
    size = pair(images.shape[-2:], "images")
    trained = _trained_size(model) if trained_size is None else pair(trained_size, "trained_size")
    with evaluating(model):
        measured, classes = _measure(model, images)
        usual, usual_classes = measured, classes
        if trained not in (None, size):
            resized = F.interpolate(images, trained, mode="bilinear", antialias=True)
            usual, usual_classes = _measure(model, resized)
        if trained is None:
            usual, usual_classes = {}, None
        layers = tuple(_summary(layer, usual.get(name)) for name, layer in measured.items())
    agreement = None
    if classes is not None and usual_classes is not None:
        agreement = (classes == usual_classes).float().mean().item()
    sentences = (
        *_not_finite(layers),
        *_other_classes(agreement, size, trained),
        *_resolution(layers, size, trained),
        *_no_inverse(layers),
        *_switched_off(layers, size),
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
            measures = measures_of(record)
            if name in found:
                before = found[name].measures
                measures = {key: torch.cat([before[key], x]) for key, x in measures.items()}
            found[name] = _Measured(record, measures)
    return found, torch.cat(classes) if classes else None


def _summary(layer: _Measured, usual: _Measured | None) -> LayerDiagnosis:
    """Summarises a layer, compared with itself at the trained size."""
    record, attention = layer.record, layer.record.attention
    spreads = {name: Spread(x.mean().item(), x.max().item()) for name, x in layer.measures.items()}
    found: dict[str, Any] = {"name": record.name, "tokens": record.q.shape[-2], **spreads}
    if isinstance(attention, SoftmaxFreeAttention):
        landmarks, _ = attention.landmarks(record.q, record.k, record.layout)
        found["num_landmarks"] = landmarks.shape[-2]
    if "eigenvalues" in found:
        values = layer.measures["eigenvalues"]
        found["eigenvalues"] = (values.min().item(), values.max().item())
        found["normalize"] = attention.normalize
    strength = "landmark_attention_norm"
    if usual is not None and strength in found:
        found["growth"] = found[strength].mean / usual.measures[strength].mean().item()
    return LayerDiagnosis(**found)


def _trained_size(model: nn.Module) -> tuple[int, int] | None:
    """The image size that the position embeddings of a model, or of its backbone, are for."""
    for module in model.modules():
        if isinstance(module, Backbone):
            info: Any = module.feature_info
            positions = (part for part in module.modules() if isinstance(part, PositionEmbedding))
            first = next(positions, None)
            if first is None:  # positions of any size
                return None
            height, width = first.grid.shape[1:3]
            return height * info[0]["reduction"], width * info[0]["reduction"]
        size = getattr(getattr(module, "patch_embed", None), "img_size", None)  # timm's
        if size is not None:
            return pair(size, "img_size")
    return None


def _not_finite(layers: Sequence[LayerDiagnosis]) -> Iterator[str]:
    for layer in layers:
        spreads = (
            layer.passes, layer.inverse_norm, layer.middle_norm, layer.norm, layer.residual
        )  # fmt: skip
        if not all(spread is None or math.isfinite(spread.max) for spread in spreads):
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
    residuals = {layer.name: layer.residual.max for layer in layers if layer.residual is not None}
    worst = max(residuals, key=lambda name: residuals[name], default=None)
    if worst is not None and residuals[worst] > MOST_RESIDUAL:
        yield (
            f"the inverse in layer {worst!r} leaves a residual |B X B - B| / |B| of "
            f"{residuals[worst]:.1g}, more than {MOST_RESIDUAL:g}: take more iters, a ridge, or "
            "inverse='auto'"
        )


def _switched_off(layers: Sequence[LayerDiagnosis], size: tuple[int, int]) -> Iterator[str]:
    off = [layer for layer in layers if layer.passes.mean < LEAST_PASSED]
    if off:
        named = ", ".join(f"{layer.name} ({100 * layer.passes.mean:.2g} %)" for layer in off)
        yield (
            f"at {by(size)} pixels attention is switched off in {len(off)} of {len(layers)} "
            f"layers, which pass less than a tenth of their values' magnitude: {named}"
        )
