"""What a run leaves for people: curves, scores at several sizes, the command to predict with."""

import json
import traceback
from pathlib import Path
from typing import Any

from PIL import Image

from ..data.module import Data
from ..data.sources import Source
from ..environment import command_line, commit, hardware, versions
from ..files import write_atomically, write_picture
from .log import read_metrics


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


def leave_traceback(folder: Path, rank: int) -> None:
    """Writes the traceback of the exception that is being handled into the run's folder."""
    name = f"traceback-{rank}.txt" if rank else "traceback.txt"
    write_atomically(folder / name, traceback.format_exc())


def draw_curves(folder: Path, curves: dict[str, list[str]]) -> Path:
    """curves.png: measures by title, such as the losses and the scores in validation."""
    from matplotlib.figure import Figure

    metrics = read_metrics(folder / "metrics.jsonl")
    figure = Figure(figsize=(4.5 * len(curves), 3.4), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(curves)), curves.items()):
        for name in names:
            if name in metrics:
                steps, values = zip(*metrics[name])
                axes.plot(steps, values, label=name.removesuffix("_epoch"))
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    path = folder / "curves.png"
    write_picture(path, figure)
    return path


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
