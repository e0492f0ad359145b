"""Pictures of results: the colours of all figures, and lines over the number of tokens."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_atomically

try:
    import matplotlib as mpl
except ImportError:
    raise UserError(
        "pictures need matplotlib; install it with: pip install 'softmaxfree[plots]'"
    ) from None
mpl.use("agg")

import matplotlib.pyplot as plt

METHOD: dict[str, Any] = {}
VARIANT = {"markerfacecolor": "white"}
PACKAGE = {"markerfacecolor": "white", "linestyle": "--"}

LOOKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "softpp": ("#0072B2", "o", METHOD),
    "soft": ("#56B4E9", "s", METHOD),
    "softx": ("#882255", "h", METHOD),
    "softmax": ("#000000", "^", METHOD),
    "linformer": ("#D55E00", "v", METHOD),
    "performer": ("#E69F00", "D", METHOD),
    "nystromformer": ("#CC79A7", "P", METHOD),
    "reformer": ("#999999", "X", METHOD),
    "skyformer": ("#009E73", "*", METHOD),
    "spatial_reduction": ("#8C6D31", "<", METHOD),
    "gaussian": ("#332288", ">", METHOD),
    "softpp_128": ("#004C78", "o", VARIANT),
    "soft_128": ("#9AD2F2", "s", VARIANT),
    "softmax_plain": ("#555555", "^", VARIANT),
    "spatial_reduction_pooled": ("#C2A35D", "<", VARIANT),
    "linformer_package": ("#D55E00", "v", PACKAGE),
    "performer_pytorch": ("#E69F00", "D", PACKAGE),
    "nystrom_attention": ("#CC79A7", "P", PACKAGE),
    "reformer_pytorch": ("#999999", "X", PACKAGE),
    "op_softpp": ("#0072B2", "o", METHOD),
    "op_released": ("#56B4E9", "s", METHOD),
    "op_released_lean": ("#B5DDF5", "s", VARIANT),
    "op_sdpa": ("#000000", "^", METHOD),
    "op_softmax": ("#555555", "^", VARIANT),
}
"""Colour and marker of each contestant, and how its line differs from its method's.

Okabe and Ito's colours, which colour-blind readers can tell apart, and three more; a shape for each
method, for prints in grey. A variant has a shade of its method's colour, a package the colour
itself."""
COLORS = {name: look[0] for name, look in LOOKS.items()}
MARKERS = {name: look[1] for name, look in LOOKS.items()}

OTHER_COLOR, OTHER_MARKER = "#661100", "h"
"""Of a user's attention."""

PEER_COLOR = "#7F7F7F"
"""Of other models, which have their names beside them."""

QUANTITIES = {
    "forward_s": ("time, forward", "ms", 1e-3),
    "training_s": ("time, forward + backward", "ms", 1e-3),
    "forward_bytes": ("memory, forward", "MB", 1e6),
    "training_bytes": ("memory, forward + backward", "MB", 1e6),
}
"""What is drawn over n: title, unit, and the unit in seconds or bytes."""


def save(figure: Any, path: Path) -> None:
    """Writes a figure as a PNG, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    plt.close(figure)
    write_atomically(path, buffer.getvalue())


def style(name: str) -> dict[str, Any]:
    """How a contestant is drawn: ours thick, SOFT on top of it, packages dashed."""
    ours = name.endswith("softpp")
    color, marker, differs = LOOKS.get(name, (OTHER_COLOR, OTHER_MARKER, METHOD))
    return {
        "color": color,
        "linewidth": 2.6 if ours else 1.4,
        "linestyle": "-",
        "marker": marker,
        "markersize": 7.5 if ours else 4 if name == "soft" else 5,
        "markerfacecolor": color,
        "zorder": 3 if ours else 4 if name == "soft" else 2,
        **differs,
    }


def points(content: dict[str, Any], quantity: str) -> dict[str, list[tuple[int, float]]]:
    """Numbers of tokens and values by contestant, without missing values."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in content["titles"]}
    for row in content["rows"]:
        if row.get(quantity):
            found[row["contestant"]].append((row["n"], row[quantity]))
    return {name: values for name, values in found.items() if values}


def panel(ax: Any, content: dict[str, Any], quantity: str) -> None:
    """Draws a quantity against n on logarithmic axes: a line for each contestant."""
    title, unit, size = QUANTITIES[quantity]
    for name, values in points(content, quantity).items():
        growth = content["exponents"].get(name, {}).get(quantity)
        label = content["titles"][name] + (f"  ~ $n^{{{growth:.2f}}}$" if growth else "")
        ax.plot(*zip(*((n, value / size) for n, value in values)), label=label, **style(name))
    ax.set(xscale="log", yscale="log", xlabel="tokens n", title=title, ylabel=unit)
    ax.grid(alpha=0.3)
    sizes = sorted({row["n"] for row in content["rows"]})
    shown = _apart(sizes)
    ax.set_xticks(shown, [f"{n:,}" for n in shown], rotation=45 if len(shown) > 5 else 0)
    ax.set_xticks([n for n in sizes if n not in shown], minor=True, labels=[])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def memory_panel(ax: Any, content: dict[str, Any]) -> None:
    """Draws what `softmaxfree bench memory` measures: the paper's figure, on logarithmic axes."""
    panel(ax, content, "training_bytes")
    ax.set_title("memory of 12 layers in training, batch 1")


def entries(ax: Any) -> tuple[list[Any], list[str]]:
    """Lines and labels of a legend, in the order in which the lines end, from the top."""
    lines = sorted(ax.get_lines(), key=lambda line: -line.get_ydata()[-1])
    return lines, [line.get_label() for line in lines]


def _apart(sizes: Iterable[int]) -> list[int]:
    """Sizes of which each is at least about twice the one before, so that labels have room."""
    shown: list[int] = []
    for n in sizes:
        if not shown or n >= 1.9 * shown[-1]:
            shown.append(n)
    return shown


def draw_over_n(content: dict[str, Any], path: Path) -> None:
    """Draws every quantity of a result against n."""
    quantities = [key for key in QUANTITIES if points(content, key)]
    few = len(content["titles"]) <= 4
    figure, axes = plt.subplots(
        1,
        len(quantities),
        figsize=((4.6 if few else 6.6) * len(quantities), 4.2),
        layout="constrained",
        squeeze=False,
    )
    for ax, quantity in zip(axes[0], quantities):
        panel(ax, content, quantity)
        if few:
            bottom, top = ax.get_ylim()
            ax.set_ylim(bottom, top * (top / bottom) ** 0.4)  # room for the legend
            ax.legend(*entries(ax), loc="upper left", frameon=False)
        else:
            beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
            ax.legend(*entries(ax), **beside, frameon=False, fontsize=9)
    save(figure, path)
