"""What a run leaves for people: its record, its curves, and commands to try next."""

import json
import shlex
import traceback
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..allow_list import is_number
from ..analysis.hooks import evaluating, recorded_attention
from ..data.base import Data
from ..data.image_files import read_image
from ..data.paths import read_file
from ..data.sources import Source
from ..environment import command_line, commit, hardware, program, versions
from ..files import write_atomically, write_picture
from ..layers.multihead import MultiHeadAttention
from ..models.weights import find_weights
from ..tasks.predict import Classifier
from .log import read_metrics

Place = tuple[float, float]
"""(height, width) on an image, from 0 at the upper left to 1."""
LONGEST_RECORD = 2**24
"""The most bytes of a run.json or a config.yaml."""


def origin() -> dict[str, Any]:
    """The command, commit, hardware and versions of a run."""
    return {
        "command": command_line(),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
    }


def describe_run(folder: Path, **known: Any) -> None:
    """Writes run.json, the record of a run."""
    write_atomically(folder / "run.json", json.dumps(known, indent=1) + "\n")


def continued(
    folder: Path, now: dict[str, Any], new: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """How a resumed run began, with each process that has resumed it, and its seconds so far.

    Args:
        folder: The run's folder, with the run.json so far.
        now: The origin of this process.
        new: From where it resumes the run.
    """
    try:
        told = dict(json.loads(read_file(folder / "run.json", LONGEST_RECORD)))
    except (ValueError, TypeError, RecursionError):  # none yet, or not by `fit`
        told = {}
    before, seconds = told.get("resumed"), told.get("seconds", 0)
    began = {name: told.get(name, value) for name, value in now.items()}
    entries = [*(before if isinstance(before, list) else []), {**new, **now}]
    return {**began, "resumed": entries}, float(seconds) if is_number(seconds) else 0.0


def leave_traceback(folder: Path, rank: int) -> None:
    """Writes the traceback of the exception that is being handled into the run's folder."""
    name = f"traceback-{rank}.txt" if rank else "traceback.txt"
    write_atomically(folder / name, traceback.format_exc())


def draw_run(folder: Path, curves: dict[str, list[str]], example: Path | None) -> Path:
    """Draws run.png: curves, and below them what a classifier attends to on an image.

    Args:
        folder: The run's folder.
        curves: Names of metrics by the title of their panel.
        example: A held-out image; without one, or if the model's attention cannot be recorded,
            only the curves are drawn.
    """
    from matplotlib.figure import Figure

    panels, (y, x) = _attended(folder, example)
    figure = Figure(figsize=(4.5 * len(curves), 5.6 if panels else 3.4), layout="constrained")
    upper: Any = figure
    if panels:
        grid = figure.add_gridspec(2, 1, height_ratios=(3.4, 2.2))
        upper, lower = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        lower.suptitle("what the patch at the cross attends to, layer by layer", fontsize=10)
        for axes, (title, pixels) in zip(lower.subplots(1, len(panels)), panels.items()):
            axes.imshow(pixels, extent=(0, 1, 1, 0))
            axes.plot(x, y, "+", color="red", markersize=9, markeredgewidth=2)
            axes.set_title(title, fontsize=9)
            axes.set_axis_off()
    _draw_curves(upper.subplots(1, len(curves)), curves, read_metrics(folder / "metrics.jsonl"))
    write_picture(folder / "run.png", figure)
    return folder / "run.png"


def _draw_curves(
    panels: Any, curves: dict[str, list[str]], metrics: dict[str, list[tuple[float, float]]]
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


def _attended(folder: Path, example: Path | None) -> tuple[dict[str, Tensor], Place]:
    """Panels by title: the image with its prediction, and each layer's attention over all heads.

    The patch, whose place is returned too, is at the centre of what differs most from the image's
    average colour.
    """
    nothing: tuple[dict[str, Tensor], Place] = {}, (0.5, 0.5)
    if example is None or not (folder / "last.ckpt").is_file():
        return nothing
    weights = find_weights(folder / "last.ckpt")
    if weights.task != "Classification":
        return nothing
    classifier = Classifier(weights)
    if not any(isinstance(module, MultiHeadAttention) for module in classifier.model.modules()):
        return nothing
    tensor = classifier.tensor(read_image(example))
    with evaluating(classifier.model), recorded_attention(classifier.model) as layers:
        probabilities = classifier.model(tensor).softmax(1)[0]
    image = classifier.seen(tensor)
    y, x = _middle(image)
    best = int(probabilities.argmax())
    every = max(1, (len(layers) + 4) // 5)  # five panels and the image fit
    panels = {f"{classifier.classes[best]}: {probabilities[best] * 100:.0f} %": image}
    for number, record in list(enumerate(layers.values(), start=1))[::every]:
        rows = record.rows([record.token_at(y, x)])[0].squeeze(-2)
        panels[f"layer {number}"] = record.on_grid(rows).mean(0)
    return panels, (y, x)


def _middle(image: Tensor) -> Place:
    """(S, S, 3) -> (height, width), from 0 to 1, of the centre of what differs from the average."""
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
    """Commands to try on a finished run, ready to be pasted into a shell.

    Args:
        folder: The run's folder.
        example: A held-out image.
        modules: The run's --modules.
        data: Name and root of the data set, which are not taken from a checkpoint.
    """
    if not (folder / "last.ckpt").is_file():  # there was nothing left to train
        return []
    last = shlex.quote(str(folder / "last.ckpt"))
    words = "".join(modules) if len(modules) == 1 else shlex.quote(f"[{','.join(modules)}]")
    own = f" --modules {words}" if modules else ""
    given = "".join(
        f" --data.{name} {shlex.quote(value)}"
        for name, value in data.items()
        if data["root"] and value
    )
    found = []
    weights = find_weights(folder / "last.ckpt")
    if example:
        found.append(f"predict {shlex.quote(str(example))} --checkpoint {last}{own}")
    if example and weights.task == "Classification":
        image, size = shlex.quote(str(example)), weights.preparation.size
        found.append(f"figures heatmap --checkpoints {last} --images {image}{own}")
        sizes = f"{size} {size * 3 // 2} {size * 2}"
        found.append(f"validate --checkpoint {last} --data.eval_sizes {sizes}{given}{own}")
    else:
        found.append(f"validate --checkpoint {last}{given}{own}")
    return [f"{program()} {command}" for command in found]


def example_image(data: Data, folder: Path) -> Path | None:
    """Writes example.png, the first readable image of the validation split."""
    source = data.sources.get("val")
    if not isinstance(source, Source):
        return None
    for index in range(min(len(source), 20)):
        try:
            image, _ = source.load(index)
        except Exception:  # a broken image
            continue
        if not isinstance(image, Image.Image):  # a sequence
            return None
        write_picture(folder / "example.png", image)
        return folder / "example.png"
    return None
