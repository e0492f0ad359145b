"""Pictures of results."""

import io
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .contestants import CONTESTANTS

try:
    import matplotlib as mpl
except ImportError:
    raise ModuleNotFoundError(
        "pictures need matplotlib; install it with: pip install 'softmaxfree[plots]'"
    ) from None
mpl.use("agg")

import matplotlib.pyplot as plt

COLORS = {
    "softpp": "#0b6e4f",
    "released": "#c8553d",
    "released_lean": "#e8a87c",
    "sdpa": "#3d5a80",
    "softmax": "#98c1d9",
}


def draw_attention(content: dict[str, Any], path: Path) -> None:
    """Lines over n where the cases differ in n alone, bars for each case otherwise."""
    cases = {(row["batch"], row["heads"]) for row in content["rows"]}
    figure = _lines(content) if len(cases) == 1 else _bars(content)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    plt.close(figure)
    write_atomically(path, buffer.getvalue())


def _lines(content: dict[str, Any]) -> Any:
    rows = content["rows"]
    quantities = [
        (key, title, unit)
        for key, title, unit in (
            ("forward_s", "time, forward (s)", 1),
            ("training_s", "time, forward + backward (s)", 1),
            ("forward_bytes", "memory, forward (MB)", 1e6),
            ("training_bytes", "memory, forward + backward (MB)", 1e6),
        )
        if any(row.get(key) for row in rows)
    ]
    figure, axes = plt.subplots(
        1, len(quantities), figsize=(4.6 * len(quantities), 4), layout="constrained", squeeze=False
    )
    for ax, (key, title, unit) in zip(axes[0], quantities):
        for name in dict.fromkeys(row["contestant"] for row in rows):
            points = [
                (row["n"], row[key] / unit)
                for row in rows
                if row["contestant"] == name and row.get(key)
            ]
            growth = content["exponents"].get(name, {}).get(key)
            label = CONTESTANTS[name].title + (f"  ~ n^{growth:.2f}" if growth else "")
            ax.plot(*zip(*points), "o-", color=COLORS[name], label=label)
        ax.set(xscale="log", yscale="log", xlabel="tokens n", title=title)
        sizes = sorted({row["n"] for row in rows})
        ax.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        bottom, top = ax.get_ylim()
        ax.set_ylim(bottom, top * (top / bottom) ** 0.4)  # room for the legend
        ax.legend(loc="upper left", frameon=False)
    return figure


def _bars(content: dict[str, Any]) -> Any:
    rows = content["rows"]
    cases = list(dict.fromkeys((row["batch"], row["heads"], row["n"]) for row in rows))
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    panels = [("forward_s", "forward", 1), ("training_s", "forward + backward", 3)]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for ax, (key, title, passes) in zip(axes, panels):
        for i, name in enumerate(names):
            ratios = [
                row[key] / (passes * row["products_s"]) for row in rows if row["contestant"] == name
            ]
            places = [j + 0.8 * (i - (len(names) - 1) / 2) / len(names) for j in range(len(cases))]
            ax.bar(
                places, ratios, 0.8 / len(names), color=COLORS[name], label=CONTESTANTS[name].title
            )
        ax.axhline(1, color="black", linewidth=0.8, linestyle="--")
        ax.set_xticks(range(len(cases)), [f"{b} x {h} heads\nn = {n:,}" for b, h, n in cases])
        ax.set(yscale="log", title=title)
        ax.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("time, in units of SOFT++'s matrix products")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
