"""What is measured rather than trained: costs, convergence, norms, the speed of the gradient."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ...data.sources import open_source
from ...models.cost import cost, image_bytes, kept_bytes
from ...ops.inverse import INVERSES
from ..bench.trained import TrainedRun
from ..figures import newton as newton_figure
from ..figures import spectrum as spectrum_figure
from ..figures.subject import Subject, subjects
from ..measure import time_interleaved
from ..results import table
from .contestants import PAPER, Budget
from .records import contestant_runs

BATCH = 32
"""Images of the training steps that are timed."""
IMAGES = 20
"""Test images that convergence is measured on, two of each class."""

Rows = list[dict[str, Any]]


class Dots(NamedTuple):
    """What the picture of an experiment shows."""

    values: dict[str, list[float]]
    quantity: str
    """The label of the axis."""
    log: bool = False


class Findings(NamedTuple):
    """What an experiment found; texts are Markdown."""

    verdicts: list[str]
    """*held*, *not held* or *cannot tell*, for each claim."""
    claims: str
    """The claims with their verdicts."""
    report: str
    """Everything."""
    dots: Dots


class Measurement(NamedTuple):
    """A claim that is not about accuracy."""

    title: str
    claim: str
    measure: Callable[[Path, Sequence[int]], Rows]
    """Measures the models in a folder of runs, by seed."""
    judge: Callable[[Rows], tuple[str, str, str, Dots]]
    """Verdict, sentence, table and picture of the rows."""

    def findings(self, rows: Rows) -> Findings:
        verdict, sentence, shown, dots = self.judge(rows)
        text = f"{self.claim} *{verdict}*: {sentence}\n\n{shown}"
        return Findings([verdict], text, text, dots)


def costs(names: Sequence[str], budget: Budget) -> Rows:
    """Parameters, multiply-adds, memory per image and training throughput of contestants.

    Steps of all contestants are timed in turns, and the best of each counts.
    """
    shape = 3, budget.side, budget.side
    images, labels = torch.randn(BATCH, *shape), torch.zeros(BATCH, dtype=torch.long)
    models = {name: budget.contestants[name].build(budget.classes) for name in names}
    steps: dict[str, Callable[[], None]] = {
        name: partial(training_step, model, images, labels) for name, model in models.items()
    }
    times = time_interleaved(steps, repeats=8)
    return [
        {
            "contestant": name,
            "parameters": counted.parameters,
            "multiply_adds": counted.multiply_adds,
            "image_bytes": image_bytes(model, *shape),
            "images_per_second": BATCH / times[name].best,
        }
        for name, model in models.items()
        for counted in [cost(model, *shape)]
    ]


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Forward and backward pass."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()


def measure_newton(runs: Path, seeds: Sequence[int]) -> Rows:
    """Residuals of every method in every stage."""
    rows: Rows = []
    for seed, subject in _trained(runs, seeds):
        matrices = newton_figure.landmark_matrices(subject, _test_images(IMAGES))
        for curve in newton_figure.curves(matrices):
            about = {"seed": seed, "stage": curve.stage, "method": curve.method}
            residuals = {f"residual after {k}": curve.mean[k - 1] for k in (5, 10, 20)}
            rows.append(about | {"steps to 1e-3": curve.steps} | residuals)
    return rows


def judge_newton(rows: Rows) -> tuple[str, str, str, Dots]:
    lines, after = [], {}
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        after[method] = [row["residual after 20"] for row in own]
        steps = [row["steps to 1e-3"] for row in own]
        reached = "not in all" if None in steps else f"{min(steps)} to {max(steps)}"
        lines.append([method, reached, f"{max(after[method]):.1e}"])
    enough = sum(residual <= newton_figure.ENOUGH for residual in after["paper"])
    stages = len(after["paper"])
    return (
        "held" if enough == stages else "not held",
        "the paper's iteration comes to a residual of 1e-3 within 20 steps in "
        f"{enough} of {stages} stages of all seeds.",
        table(["method", "steps to 1e-3", "worst after 20 steps"], lines, markdown=True),
        Dots(after, "|A X A - A| / |A| after 20 steps, a dot for each stage and seed", log=True),
    )


def measure_spectrum(runs: Path, seeds: Sequence[int]) -> Rows:
    """The exponents p of norm ~ m^p."""
    rows: Rows = []
    for seed, subject in _trained(runs, seeds):
        found: list[spectrum_figure.Row] = []
        for image in _test_images(spectrum_figure.IMAGES):
            for side in spectrum_figure.SIDES:
                matrix = spectrum_figure.landmark_matrix(subject, image, side)
                found += spectrum_figure.measured("", [matrix])
        for inverse in spectrum_figure.LINES:
            for norm in spectrum_figure.NORMS:
                exponent = spectrum_figure.growth(found, inverse, norm)
                rows.append({"seed": seed, "inverse": inverse, "norm": norm, "exponent": exponent})
    return rows


def judge_spectrum(rows: Rows) -> tuple[str, str, str, Dots]:
    lines, dots = [], {}
    for inverse, norm in dict.fromkeys((row["inverse"], row["norm"]) for row in rows):
        own = [row for row in rows if (row["inverse"], row["norm"]) == (inverse, norm)]
        known = [row["exponent"] for row in own if row["exponent"] is not None]
        shown = f"{min(known):.2f} to {max(known):.2f}" if known else "no full rank"
        lines.append([inverse, norm, shown, str(spectrum_figure.PAPER.get(norm, "-"))])
        if known:
            dots[f"{norm}, {inverse}"] = known
    verdict, sentence = "cannot tell", "the matrices have no full rank in float64."
    if {"soft, exact", "softpp, exact"} <= set(dots):
        soft, softpp = max(dots["soft, exact"]), max(dots["softpp, exact"])
        verdict = "held" if soft <= 2 and softpp <= 1 else "not held"
        sentence = f"with the exact inverse the exponents are at most {soft:.2f} and {softpp:.2f}."
    shown = table(["inverse", "norm of", "grows as m^", "paper"], lines, 2, markdown=True)
    return verdict, sentence, shown, Dots(dots, "the p of norm ~ m^p, a dot for each seed")


def measure_backward(runs: Path, seeds: Sequence[int]) -> Rows:
    """Time and memory of a training step of untrained models, with both gradients."""
    rows: Rows = []
    for name, size, batch in (("softpp_nano", 32, 32), ("softpp_tiny", 224, 2)):
        torch.manual_seed(0)
        model = timm.create_model(name, inverse="newton", iters=20, num_classes=10)
        images, labels = torch.randn(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
        step = partial(training_step, model, images, labels)
        through = _gradient_through_the_steps()(step)
        times = time_interleaved({"closed form": step, "through 20 steps": through}, 10)
        kept = {"closed form": kept_bytes(model, batch, 3, size, size)}
        with _gradient_through_the_steps():
            kept["through 20 steps"] = kept_bytes(model, batch, 3, size, size)
        about = {"model": name, "size": size, "batch": batch}
        rows += [
            about | {"gradient": way, "step_s": times[way].best, "kept_bytes": kept[way]}
            for way in times
        ]
    return rows


@contextmanager
def _gradient_through_the_steps() -> Iterator[None]:
    """Lets autograd follow the iteration, in place of the gradient in closed form."""
    closed = INVERSES["newton"]
    try:
        INVERSES["newton"] = closed.__wrapped__  # type: ignore[attr-defined]
        yield
    finally:
        INVERSES["newton"] = closed


def judge_backward(rows: Rows) -> tuple[str, str, str, Dots]:
    lines, dots = [], {}
    for row in rows:
        name, ms = [row["model"], row["gradient"]], 1e3 * row["step_s"]
        lines.append([*name, f"{ms:.0f}", f"{row['kept_bytes'] / 1e6:.0f}"])
        dots[", ".join(name)] = [ms]
    pairs = zip(rows[::2], rows[1::2])
    ratios = [through["step_s"] / closed["step_s"] for closed, through in pairs]
    times = " and ".join(f"{ratio:.2f}" for ratio in ratios)
    return (
        "held" if min(ratios) > 1 else "not held",
        f"a training step through the iteration takes {times} times as long.",
        table(["model", "gradient", "step, ms", "kept, MB"], lines, 2, markdown=True),
        Dots(dots, "a training step (ms)"),
    )


MEASURED: dict[str, Measurement] = {
    "newton": Measurement(
        "Convergence of the inverse in trained models",
        "The paper: its iteration converges within 20 steps in all stages.",
        measure_newton,
        judge_newton,
    ),
    "spectrum": Measurement(
        "Spectral norms in trained models",
        "The paper: |A^+| grows as m^2, and as m with normalisation.",
        measure_spectrum,
        judge_spectrum,
    ),
    "backward": Measurement(
        "The gradient of the inverse in closed form",
        "The paper: the gradient in closed form saves the iteration's backward pass.",
        measure_backward,
        judge_backward,
    ),
}
"""By their names on the command line."""


def softpp_runs(
    runs: Path, seeds: Sequence[int] = PAPER.seeds, arguments: Sequence[str] = ()
) -> list[TrainedRun]:
    """SOFT++ of each seed, whose weights are measured."""
    return [
        TrainedRun(run.folder, run.arguments)
        for run in contestant_runs("softpp", runs, runs, PAPER, arguments, seeds)
    ]


def _trained(runs: Path, seeds: Sequence[int]) -> Iterator[tuple[int, Subject]]:
    for seed, run in zip(seeds, softpp_runs(runs, seeds)):
        (subject,) = subjects([run.folder / "last.ckpt"])
        yield seed, subject


def _test_images(count: int) -> list[Image.Image]:
    """Images of CIFAR-10, evenly over the classes, which are in order."""
    source: Any = open_source("", "cifar10_whole", "test")
    return [source.load(i * len(source) // count)[0] for i in range(count)]
