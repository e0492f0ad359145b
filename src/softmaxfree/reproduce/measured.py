"""Claims that are not about accuracy: convergence and norms in models, speed of training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from PIL import Image

from ..bench.measure import time_interleaved
from ..bench.results import table
from ..bench.trained import TrainedRun
from ..data.sources import open_source
from ..figures import newton as newton_figure
from ..figures import spectrum as spectrum_figure
from ..figures.subject import Subject, subjects
from ..models.cost import kept_bytes
from ..ops.inverse import INVERSES
from .contestants import SEEDS, contestant_runs

IMAGES = 20
"""Test images that convergence is measured on, two of each class."""


class Measured(NamedTuple):
    """What was found of a claim."""

    rows: list[dict[str, Any]]
    report: str


def newton(runs: Path, seeds: Sequence[int]) -> Measured:
    """The paper: its iteration converges within 20 steps in all stages."""
    rows: list[dict[str, Any]] = []
    for seed, subject in trained(runs, seeds):
        matrices = newton_figure.bottlenecks(subject, test_images(IMAGES))
        for curve in newton_figure.curves(matrices):
            residual = {f"residual after {k}": curve.mean[k - 1] for k in (5, 10, 20)}
            enough = {"steps to 1e-3": curve.steps, **residual}
            rows.append({"seed": seed, "stage": curve.stage, "method": curve.method} | enough)
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        steps = [row["steps to 1e-3"] for row in own]
        after = [row["residual after 20"] for row in own]
        lines.append([
            method,
            "not in all" if None in steps else f"{min(steps)} to {max(steps)}",
            f"{max(after):.1e}",
        ])  # fmt: skip
    return Measured(rows, table(["method", "steps to 1e-3", "worst after 20 steps"], lines))


def spectrum(runs: Path, seeds: Sequence[int]) -> Measured:
    """The paper: |A^+| grows as m^2, and as m with normalisation."""
    rows: list[dict[str, Any]] = []
    for seed, subject in trained(runs, seeds):
        points = [
            point
            for number, image in enumerate(test_images(spectrum_figure.IMAGES))
            for point in spectrum_figure.points(
                f"image {number}",
                (
                    spectrum_figure.bottleneck_matrix(subject, image, 0, side)
                    for side in spectrum_figure.SIDES
                ),
            )
        ]
        rows += [
            {
                "seed": seed, "inverse": inverse, "norm": quantity,
                "exponent": spectrum_figure.growth(points, inverse, quantity),
            }
            for inverse in ("exact", "newton")
            for quantity in ("soft", "softpp", "soft_attention", "softpp_attention")
        ]  # fmt: skip
    lines = []
    for inverse, quantity in dict.fromkeys((row["inverse"], row["norm"]) for row in rows):
        found = [
            row["exponent"] for row in rows if (row["inverse"], row["norm"]) == (inverse, quantity)
        ]
        known = [power for power in found if power is not None]
        shown = f"{min(known):.2f} to {max(known):.2f}" if known else "no full rank"
        lines.append([inverse, quantity, shown, {"soft": "2", "softpp": "1"}.get(quantity, "-")])
    return Measured(rows, table(["inverse", "norm of", "grows as m^", "paper"], lines, 2))


def backward(runs: Path, seeds: Sequence[int]) -> Measured:
    """The paper: the gradient in closed form saves the iteration's backward pass."""
    rows: list[dict[str, Any]] = []
    for name, size, batch in (("softpp_nano", 32, 32), ("softpp_tiny", 224, 2)):
        torch.manual_seed(0)
        model = timm.create_model(name, inverse="newton", iters=20, num_classes=10)
        images, labels = torch.randn(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
        step = partial(_step, model, images, labels)
        through = partial(_through_the_steps, step)
        times = time_interleaved({"closed form": step, "through 20 steps": through}, 10)
        for way, timing in times.items():
            with _gradient_through(way != "closed form"):
                kept = kept_bytes(model, batch, 3, size, size)
            rows.append(
                {"model": name, "size": size, "batch": batch, "gradient": way,
                 "step_s": timing.best, "kept_bytes": kept}
            )  # fmt: skip
    lines = [
        [
            row["model"],
            row["gradient"],
            _scaled(row["step_s"], 1e-3),
            _scaled(row["kept_bytes"], 1e6),
        ]
        for row in rows
    ]
    return Measured(rows, table(["model", "gradient", "step, ms", "kept, MB"], lines, 2))


MEASURED: dict[str, tuple[str, Callable[[Path, Sequence[int]], Measured]]] = {
    "newton": ("Convergence of the inverse in trained models", newton),
    "spectrum": ("Spectral norms in trained models", spectrum),
    "backward": ("The gradient of the inverse in closed form", backward),
}
"""By the names on the command line."""


def measured_runs(
    runs: Path, arguments: Sequence[str] = (), seeds: Sequence[int] = SEEDS
) -> list[TrainedRun]:
    """SOFT++ of each seed."""
    return [
        TrainedRun(run.folder, run.arguments)
        for run in contestant_runs("softpp", runs, runs, arguments, seeds)
    ]


def trained(runs: Path, seeds: Sequence[int]) -> Iterator[tuple[int, Subject]]:
    """The weights of each seed."""
    for seed, run in zip(seeds, measured_runs(runs, seeds=seeds)):
        (subject,) = subjects([run.folder / "last.ckpt"])
        yield seed, subject


def test_images(count: int) -> list[Image.Image]:
    """CIFAR-10's, evenly over the classes, which are in order."""
    source: Any = open_source("", "cifar10_whole", "test")
    return [source.load(i * len(source) // count)[0] for i in range(count)]


def _scaled(value: float, unit: float) -> str:
    return f"{value / unit:.0f}"


def _step(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()


def _through_the_steps(step: Callable[[], None]) -> None:
    with _gradient_through(True):
        step()


@contextmanager
def _gradient_through(steps: bool) -> Iterator[None]:
    """Autograd follows the iteration, as if nobody had written its gradient down."""
    closed = INVERSES["newton"]
    try:
        if steps:
            INVERSES["newton"] = closed.__wrapped__  # type: ignore[attr-defined]
        yield
    finally:
        INVERSES["newton"] = closed
