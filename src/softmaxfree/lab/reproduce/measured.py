"""Claims that are not about accuracy: convergence and norms in models, speed of training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from PIL import Image

from ...data.sources import open_source
from ...models.cost import kept_bytes
from ...ops.inverse import INVERSES
from ..bench.trained import TrainedRun
from ..figures import newton as newton_figure
from ..figures import spectrum as spectrum_figure
from ..figures.subject import Subject, subjects
from ..measure import time_interleaved
from ..results import table
from .contestants import SEEDS, contestant_runs
from .costs import training_step

IMAGES = 20
"""Test images that convergence is measured on, two of each class."""


class Measured(NamedTuple):
    """What was found of a claim."""

    rows: list[dict[str, Any]]
    report: str
    verdict: str
    """A sentence, *held*, *not held* or *cannot tell* first."""
    dots: dict[str, list[float]]
    """What is drawn."""
    quantity: str
    """What it is."""
    log: bool = False


def newton(runs: Path, seeds: Sequence[int]) -> Measured:
    """The paper: its iteration converges within 20 steps in all stages."""
    rows: list[dict[str, Any]] = []
    for seed, subject in trained(runs, seeds):
        matrices = newton_figure.landmark_matrices(subject, test_images(IMAGES))
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
    papers = [row for row in rows if row["method"] == "paper"]
    enough = sum(row["residual after 20"] <= newton_figure.ENOUGH for row in papers)
    return Measured(
        rows,
        table(["method", "steps to 1e-3", "worst after 20 steps"], lines),
        f"*{'held' if enough == len(papers) else 'not held'}*: the paper's iteration comes to a "
        f"residual of 1e-3 within 20 steps in {enough} of {len(papers)} stages of all seeds.",
        _collected(rows, "method", "residual after 20"),
        "|A X A - A| / |A| after 20 steps, a dot for each stage and seed",
        log=True,
    )


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
                    spectrum_figure.landmark_matrix(subject, image, 0, side)
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
    exact = _collected([row for row in rows if row["inverse"] == "exact"], "norm", "exponent")
    if not (exact.get("soft") and exact.get("softpp")):
        verdict = "*cannot tell*: the matrices have no full rank in float64."
    else:
        within = max(exact["soft"]) <= 2 and max(exact["softpp"]) <= 1
        verdict = (
            f"*{'held' if within else 'not held'}*: with the exact inverse the exponents are at "
            f"most {max(exact['soft']):.2f} and {max(exact['softpp']):.2f}."
        )
    return Measured(
        rows,
        table(["inverse", "norm of", "grows as m^", "paper"], lines, 2),
        verdict,
        {
            f"{norm}, {inverse}": values
            for inverse in ("exact", "newton")
            for norm, values in _collected(
                [row for row in rows if row["inverse"] == inverse], "norm", "exponent"
            ).items()
        },
        "the p of norm ~ m^p, a dot for each seed",
    )


def backward(runs: Path, seeds: Sequence[int]) -> Measured:
    """The paper: the gradient in closed form saves the iteration's backward pass."""
    rows: list[dict[str, Any]] = []
    for name, size, batch in (("softpp_nano", 32, 32), ("softpp_tiny", 224, 2)):
        torch.manual_seed(0)
        model = timm.create_model(name, inverse="newton", iters=20, num_classes=10)
        images, labels = torch.randn(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
        step = partial(training_step, model, images, labels)
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
    ratios = [
        through["step_s"] / closed["step_s"] for closed, through in zip(rows[::2], rows[1::2])
    ]
    return Measured(
        rows,
        table(["model", "gradient", "step, ms", "kept, MB"], lines, 2),
        f"*{'held' if min(ratios) > 1 else 'not held'}*: a training step through the iteration "
        f"takes {' and '.join(f'{ratio:.2f}' for ratio in ratios)} times as long.",
        {f"{row['model']}, {row['gradient']}": [row["step_s"] * 1e3] for row in rows},
        "a training step (ms)",
    )


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


def _collected(rows: Sequence[dict[str, Any]], name: str, value: str) -> dict[str, list[float]]:
    """Values by name, without those that are not known."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row[value] is not None:
            found.setdefault(row[name], []).append(row[value])
    return found


def _scaled(value: float, unit: float) -> str:
    return f"{value / unit:.0f}"


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
