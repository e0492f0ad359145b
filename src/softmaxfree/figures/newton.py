"""`softmaxfree figures newton`: how fast the iterations come to the inverse, by stage."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.inverse import INVERSES, add_ridge, check_inverse
from .drawing import axes, save
from .subject import Subject

METHODS = {
    "paper": "paper, alpha = 2 / |A|²",
    "newton": "newton, alpha = 1.8 / |A|²",
    "damped": "release of SOFT",
    "backtrack": "release of SOFT++",
    "rescaled": "rescaled, the default on GPUs",
}
"""The iterative ones, with what they are."""
ENOUGH = 1e-3
MOST_STEPS = 30


class Curve(NamedTuple):
    """Residuals of one method in one stage, after 1, 2, ... steps, over all images and heads."""

    stage: str
    method: str
    mean: list[float]
    lowest: list[float]
    highest: list[float]

    @property
    def steps(self) -> int | None:
        """After which the mean is at most 1e-3."""
        return next((k for k, value in enumerate(self.mean, 1) if value <= ENOUGH), None)


def residual(a: Tensor, x: Tensor) -> Tensor:
    """|A X A - A| / |A| in Frobenius norms: (..., m, m) -> (...)."""
    norm = torch.linalg.matrix_norm
    return norm(a @ x @ a - a) / norm(a)


def curves(matrices: dict[str, list[Tensor]], steps: int = MOST_STEPS) -> Iterable[Curve]:
    """Of bottleneck matrices (heads, m, m) in float64, by stage; a ridge is a part of A."""
    for stage, found in matrices.items():
        for method in METHODS:
            ridge = check_inverse(method, 1, None)
            after = []
            for k in range(1, steps + 1):
                values = [
                    residual(add_ridge(a, ridge), INVERSES[method](a, k, ridge)) for a in found
                ]
                after.append(torch.cat(values))
            table = torch.stack(after)  # (steps, matrices)
            yield Curve(
                stage,
                method,
                table.mean(1).tolist(),
                table.amin(1).tolist(),
                table.amax(1).tolist(),
            )


def run(subject: Subject, out: Path) -> list[Curve]:
    """Draws it, writes the numbers, and says how many steps are enough."""
    found = list(curves(subject.bottlenecks()))
    stages = list(dict.fromkeys(curve.stage for curve in found))
    figure, panels = axes(len(stages))
    for ax, stage in zip(panels, stages):
        for number, curve in enumerate(curve for curve in found if curve.stage == stage):
            steps, color = range(1, len(curve.mean) + 1), f"C{number}"
            ax.plot(steps, curve.mean, color=color, label=METHODS[curve.method])
            ax.fill_between(steps, curve.lowest, curve.highest, color=color, alpha=0.15)
        ax.axhline(ENOUGH, color="black", linewidth=0.8, linestyle=":")
        ax.set(yscale="log", xlabel="steps", title=stage, ylim=(1e-16, 2))
    panels[0].set_ylabel("|A Aₖ A − A| / |A|")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    rows = [
        [curve.stage, curve.method, k, *values]
        for curve in found
        for k, values in enumerate(zip(curve.mean, curve.lowest, curve.highest), 1)
    ]
    save(figure, ["stage", "method", "steps", "mean", "lowest", "highest"], rows, out / "newton")
    for curve in found:
        said = "more than the steps shown" if curve.steps is None else f"{curve.steps} steps"
        print(f"{curve.stage:10}{METHODS[curve.method]:32}{said} to {ENOUGH:g}")
    return found
