"""The picture of an experiment: every measurement a dot, a line for each contestant."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..figures.drawing import panels
from ..pictures import COLORS, save


def draw_dots(
    values: Mapping[str, Sequence[float]], title: str, quantity: str, path: Path, log: bool = False
) -> None:
    """Sorted by their means, which are ticks; colours follow the word before the first comma."""
    names = sorted(values, key=lambda name: statistics.fmean(values[name]))
    figure, ((ax,),) = panels(1, width=6.4, height=0.8 + 0.36 * len(names))
    for place, name in enumerate(names):
        color = COLORS.get(name.partition(",")[0], "#555555")
        ax.plot(values[name], [place] * len(values[name]), "o", color=color, alpha=0.6)
        ax.plot(statistics.fmean(values[name]), place, "|", color=color, markersize=18)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel=quantity, ylim=(-0.6, len(names) - 0.4))
    figure.suptitle(title, fontsize=10)
    if log:
        ax.set_xscale("log")
    ax.grid(alpha=0.3)
    save(figure, path)
