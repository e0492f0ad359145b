"""`softmaxfree figures newton`: how fast each method comes to the inverse, stage by stage."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...imports import Names, import_modules
from ...layers.attention import SoftmaxFreeAttention
from ...ops.inverse import INVERSES, Inverse
from ...ops.matrices import add_ridge
from ..results import table
from .drawing import panels, save
from .subject import Subject, given_images, subjects

METHODS: dict[str, tuple[str, str, str]] = {
    "paper": ("paper", "#000000", "-"),
    "newton": ("newton: the paper's, a start that converges", "#0072B2", "--"),
    "damped": ("damped: the release of SOFT, ridge", "#56B4E9", "-"),
    "backtrack": ("backtrack: the release of SOFT++", "#CC79A7", "-"),
    "rescaled": ("rescaled: auto on accelerators, ridge", "#D55E00", "-"),
    "cholesky": ("cholesky: auto on CPUs, ridge", "#009E73", ":"),
    "exact": ("exact: eigendecomposition", "#999999", ":"),
}
"""By name: the label, colour and line of each. A dotted line is a method without steps."""

ENOUGH = 1e-3
MOST_STEPS = 30
IMAGES = 20


class Curve(NamedTuple):
    """Residuals of one method in one stage after 1, 2, ... steps, over all matrices."""

    stage: str
    method: str
    mean: list[float]
    lowest: list[float]
    highest: list[float]

    @property
    def steps(self) -> int | None:
        """The number of steps from which on the mean stays at 1e-3 or less."""
        above = [k for k, value in enumerate(self.mean, 1) if not value <= ENOUGH]
        last = max(above, default=0)
        return None if last == len(self.mean) else last + 1

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each number of steps."""
        for steps, values in enumerate(zip(self.mean, self.lowest, self.highest), 1):
            about = {"stage": self.stage, "method": self.method, "steps": steps}
            yield about | dict(zip(("mean", "lowest", "highest"), values))


def residual(a: Tensor, x: Tensor) -> Tensor:
    """|A X A - A| / |A| in Frobenius norms: (..., m, m) -> (...)."""
    norm = torch.linalg.matrix_norm
    return norm(a @ x @ a - a) / norm(a)


def residuals(method: str, a: Tensor, steps: Iterable[int], ridge: float | None = None) -> Tensor:
    """Residuals of a method after each number of steps: (..., m, m) -> (steps, ...).

    The residual of a method with a ridge, by default its own, is that of A with the ridge.
    """
    ridge = Inverse.checked(method, ridge=ridge).ridge
    inverted = add_ridge(a, ridge)
    with torch.no_grad():
        return torch.stack([residual(inverted, INVERSES[method](a, k, ridge)) for k in steps])


def curves(matrices: Mapping[str, Tensor]) -> Iterator[Curve]:
    """Yields the curves of stacks (count, m, m) of landmark matrices in float64, by stage."""
    for stage, a in matrices.items():
        for method in METHODS:
            after = residuals(method, a, range(1, MOST_STEPS + 1))
            ranges = (after.mean(1).tolist(), after.amin(1).tolist(), after.amax(1).tolist())
            yield Curve(stage, method, *ranges)


def landmark_matrices(subject: Subject, images: Iterable[Any]) -> dict[str, Tensor]:
    """The landmark matrices of all images, layers and heads, (count, m, m) in float64, by stage."""
    found: dict[str, list[Tensor]] = {}
    for image in images:
        for name, record in subject.record(image).items():
            own = isinstance(record.attention, SoftmaxFreeAttention)
            if own and (a := record.factors().A) is not None:
                found.setdefault(stage_of(name), []).append(a.double().flatten(0, 1))
    if not found:
        raise UserError(
            f"{subject.title} has no landmark matrices to invert; give the checkpoint of a model "
            "with SOFT or SOFT++"
        )
    return {stage: torch.cat(stacks) for stage, stacks in found.items()}


def stage_of(layer: str) -> str:
    """The stage that a layer of a pyramid is in; other models have one."""
    number = re.match(r"stages[._](\d+)", layer)
    return f"stage {int(number[1]) + 1}" if number else "all layers"


def draw_newton(
    checkpoint: Path | None = None,
    images: list[Path] | None = None,
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw how fast each method converges to the inverse, stage by stage.

    |A X A - A| / |A| of the landmark matrices A of a model against the number of steps, mean and
    range over images, layers and heads, in float64. Prints how many steps reach 1e-3.

    Args:
        checkpoint: Trained weights of a classifier with SOFT or SOFT++, such as runs/mine;
            default: the SOFT++ model that comes with the package.
        images: Image files, such as [cat.jpg,dog.jpg]; default: 20 handwritten digits.
        out: Folder for newton.png, newton.svg and newton.csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    import_modules(modules)
    (subject,) = subjects([checkpoint] if checkpoint else None, embedded=["softpp"])
    matrices = landmark_matrices(subject, given_images(images, IMAGES).values())
    found = list(curves(matrices))
    figure, (axes,) = panels(len(matrices), height=4.1)
    for ax, (stage, a) in zip(axes, matrices.items()):
        _draw_curves(ax, [curve for curve in found if curve.stage == stage])
        ax.set_title(f"{stage}, m = {a.shape[-1]}")
    axes[0].set_ylabel("|A Aₖ A − A| / |A|")  # noqa: RUF001
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(axes) < 3 else 3)
    save(figure, [row for curve in found for row in curve.rows()], out / "newton")
    print(f"\nSteps until |A X A - A| / |A| is {ENOUGH:g} or less, mean over images and heads:\n")
    print(steps_table(found))


def _draw_curves(ax: Any, found: Sequence[Curve]) -> None:
    for curve in found:
        label, color, line = METHODS[curve.method]
        # An exact 0 has no place on a logarithmic axis.
        mean, *ends = np.maximum((curve.mean, curve.lowest, curve.highest), 1e-17)
        steps = range(1, len(mean) + 1)
        ax.plot(steps, mean, color=color, linestyle=line, label=label)
        ax.fill_between(steps, *ends, color=color, alpha=0.08, lw=0)
    ax.axhline(ENOUGH, color="black", linewidth=0.6)
    ax.set(yscale="log", ylim=(1e-17, 5), xlim=(1, MOST_STEPS), xlabel="steps k")
    ax.grid(alpha=0.3)


def steps_table(found: Sequence[Curve]) -> str:
    """A line for each method, a column for each stage."""
    stages = list(dict.fromkeys(curve.stage for curve in found))
    rows = []
    for method, (label, _, line) in METHODS.items():
        own = [curve for curve in found if curve.method == method]
        if line == ":":
            cells = ["direct" if curve.steps == 1 else "not reached" for curve in own]
        else:
            cells = [str(curve.steps or f"more than {len(curve.mean)}") for curve in own]
        rows.append([label, *cells])
    return table(["method", *stages], rows)
