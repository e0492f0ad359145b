"""What a run leaves for people: curves, scores at several sizes, the command to predict with."""

import json
import shlex
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..analysis.recording import evaluating, recorded_attention
from ..data.image_files import read_image
from ..data.module import Data
from ..data.paths import read_file
from ..data.sources import Source
from ..environment import command_line, commit, hardware, program, versions
from ..files import write_atomically, write_picture
from ..layers.multihead import MultiHeadAttention
from ..tasks.predict import Classifier, read_run_checkpoint
from .log import read_metrics

_LONGEST_RECORD = 2**24
"""Bytes of a run.json."""


def origin() -> dict[str, Any]:
    """Command, commit, hardware and versions of a run that begins."""
    return {
        "command": command_line(),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
    }


def describe_run(folder: Path, **known: Any) -> None:
    """Writes run.json: what is known of a run."""
    write_atomically(folder / "run.json", json.dumps(known, indent=1) + "\n")


def resumptions(folder: Path, new: dict[str, Any] | None) -> dict[str, Any]:
    """What run.json tells of how often and from where a run was gone on with, `new` the latest."""
    if new is None:
        return {}
    try:
        before = json.loads(read_file(folder / "run.json", _LONGEST_RECORD))["resumed"]
    except (ValueError, KeyError, TypeError, RecursionError):  # none yet, or not ours
        before = []
    return {"resumed": [*(before if isinstance(before, list) else []), new]}


def leave_traceback(folder: Path, rank: int) -> None:
    """Writes the traceback of the exception that is being handled into the run's folder."""
    name = f"traceback-{rank}.txt" if rank else "traceback.txt"
    write_atomically(folder / name, traceback.format_exc())


def draw_run(folder: Path, curves: dict[str, list[str]], example: Path | None) -> Path:
    """run.png: curves by title, and below them what a classifier attends to on an image.

    Args:
        folder: The run's.
        curves: Names of measures by title, such as the losses and the scores in validation.
        example: A held-out image; without one, or where the model's attention cannot be recorded,
            there are curves alone.
    """
    from matplotlib.figure import Figure

    looks = _attended(folder, example)
    figure = Figure(figsize=(4.5 * len(curves), 5.6 if looks else 3.4), layout="constrained")
    upper: Any = figure
    lower: Any = None
    if looks:
        grid = figure.add_gridspec(2, 1, height_ratios=(3.4, 2.2))
        upper, lower = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    _draw_curves(upper.subplots(1, len(curves)), curves, read_metrics(folder / "metrics.jsonl"))
    if looks:
        lower.suptitle("what the patch at the cross attends to, layer by layer", fontsize=10)
        for axes, (title, draw) in zip(lower.subplots(1, len(looks)), looks):
            draw(axes)
            axes.set_title(title, fontsize=9)
            axes.set_axis_off()
    write_picture(folder / "run.png", figure)
    return folder / "run.png"


def _draw_curves(
    panels: Any, curves: dict[str, list[str]], metrics: dict[str, list[tuple[int, float]]]
) -> None:
    for axes, (title, names) in zip(panels, curves.items()):
        for name in names:
            if name in metrics:
                steps, values = zip(*metrics[name])
                axes.plot(steps, values, marker=".", label=name.removesuffix("_epoch"))
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()


def _attended(folder: Path, example: Path | None) -> list[tuple[str, Callable[[Any], None]]]:
    """Panels: the image with its prediction, and a row of each layer's attention, over all heads.

    The patch is the one at the middle of the brightest or darkest things on the image: where it
    differs most from its own average.
    """
    if example is None or not (folder / "last.ckpt").is_file():
        return []
    checkpoint = read_run_checkpoint(folder / "last.ckpt")
    if "images" not in checkpoint:
        return []
    classifier = Classifier(checkpoint)
    if not any(isinstance(module, MultiHeadAttention) for module in classifier.model.modules()):
        return []
    tensor = classifier.tensor(read_image(example))
    with evaluating(classifier.model), recorded_attention(classifier.model) as layers:
        probabilities = classifier.model(tensor).softmax(1)[0]
    seen = classifier.seen(tensor)
    y, x = _middle(seen)

    def image(axes: Any) -> None:
        axes.imshow(seen, extent=(0, 1, 1, 0))
        axes.plot(x, y, "+", color="red", markersize=9, markeredgewidth=2)

    best = int(probabilities.argmax())
    found: list[tuple[str, Callable[[Any], None]]] = [
        (f"{classifier.classes[best]}: {probabilities[best] * 100:.0f} %", image)
    ]
    for number, record in enumerate(layers.values(), start=1):
        rows = record.on_grid(record.rows([record.token_at(y, x)])[0].squeeze(-2)).mean(0)

        def weights(axes: Any, rows: Tensor = rows) -> None:
            axes.imshow(rows, extent=(0, 1, 1, 0))
            axes.plot(x, y, "+", color="red", markersize=9, markeredgewidth=2)

        found.append((f"layer {number}", weights))
    shown = 6  # more do not fit
    return found[:1] + found[1 :: max(1, (len(found) + shown - 3) // (shown - 1))]


def _middle(image: Tensor) -> tuple[float, float]:
    """(S, S, 3) -> the place, height first, in the middle of what differs from the average."""
    off = (image - image.mean((0, 1))).square().sum(-1)
    off = off / off.sum().clamp(min=1e-12)
    height, width = (
        float((off.sum(1 - axis) * (torch.arange(side) + 0.5) / side).sum())
        for axis, side in enumerate(off.shape)
    )
    return min(max(height, 0.0), 1.0), min(max(width, 0.0), 1.0)


def next_commands(
    folder: Path, example: Path | None, modules: list[str], data: dict[str, str | None]
) -> list[str]:
    """Commands to try on a finished run; each runs when pasted into a shell.

    Args:
        folder: The run's.
        example: A held-out image.
        modules: Those that the run was given.
        data: Name and root of the data set, which scoring does not take from a file.
    """
    if not (folder / "last.ckpt").is_file():  # there was nothing left to train
        return []
    last = shlex.quote(str(folder / "last.ckpt"))
    own = " --modules " + shlex.quote(f"[{','.join(modules)}]") if modules else ""
    given = "".join(
        f" --data.{name} {shlex.quote(value)}"
        for name, value in data.items()
        if data["root"] and value
    )
    found = []
    checkpoint = read_run_checkpoint(folder / "last.ckpt")
    if example:
        found.append(f"predict {shlex.quote(str(example))} --ckpt {last}{own}")
    if example and "images" in checkpoint:
        ckpts, images = (shlex.quote(f"[{path}]") for path in (folder / "last.ckpt", example))
        found.append(f"figures heatmap --ckpts {ckpts} --images {images}{own}")
        size = checkpoint["images"]["size"]
        sizes = shlex.quote(f"[{size},{size * 3 // 2},{size * 2}]")
        found.append(f"validate --ckpt_path {last} --data.eval_sizes {sizes}{given}{own}")
    else:
        found.append(f"validate --ckpt_path {last}{given}{own}")
    return [f"{program()} {command}" for command in found]


def example_image(data: Data, folder: Path) -> Path | None:
    """example.png: the first image of the validation split that can be read, to predict with."""
    source = data.sources.get("val")
    if not isinstance(source, Source):
        return None
    for index in range(min(len(source), 20)):
        try:
            image, _ = source.load(index)
        except Exception:  # one of the broken ones
            continue
        if not isinstance(image, Image.Image):  # but a sequence
            return None
        write_picture(folder / "example.png", image)
        return folder / "example.png"
    return None
