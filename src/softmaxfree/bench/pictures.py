"""Pictures of results."""

import io
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .contestants import PACKAGES

try:
    import matplotlib as mpl
except ImportError:
    raise ModuleNotFoundError(
        "pictures need matplotlib; install it with: pip install 'softmaxfree[plots]'"
    ) from None
mpl.use("agg")

import matplotlib.pyplot as plt

COLORS = {
    "op_softpp": "#0b6e4f",
    "op_released": "#c8553d",
    "op_released_lean": "#e8a87c",
    "op_sdpa": "#3d5a80",
    "op_softmax": "#98c1d9",
    "softpp": "#0b6e4f",
    "soft": "#54b48c",
    "softmax": "#3d5a80",
    "softmax_plain": "#1d2d44",
    "linformer": "#c8553d",
    "spatial_reduction": "#8d6a9f",
    "spatial_reduction_pooled": "#c3a6d1",
    "performer": "#e09f3e",
    "nystromformer": "#b5179e",
    "reformer": "#6c757d",
    "skyformer": "#00a6a6",
    "gaussian": "#98c1d9",
    "linformer_package": "#c8553d",
    "nystrom_attention": "#b5179e",
    "performer_pytorch": "#e09f3e",
    "reformer_pytorch": "#6c757d",
}
"""A package has its method's colour, and a dashed line."""


def draw_attention(content: dict[str, Any], path: Path) -> None:
    """Lines over n where the cases differ in n alone, bars for each case otherwise."""
    cases = {(row["batch"], row["heads"]) for row in content["rows"]}
    save(_lines(content) if len(cases) == 1 else _bars(content), path)


def save(figure: Any, path: Path) -> None:
    """As a PNG, whole or not at all."""
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
    width = 4.6 if len(content["titles"]) <= 4 else 6.6
    figure, axes = plt.subplots(
        1,
        len(quantities),
        figsize=(width * len(quantities), 4.2),
        layout="constrained",
        squeeze=False,
    )
    for ax, (key, title, unit) in zip(axes[0], quantities):
        for name in dict.fromkeys(row["contestant"] for row in rows):
            points = [
                (row["n"], row[key] / unit)
                for row in rows
                if row["contestant"] == name and row.get(key)
            ]
            growth = content["exponents"].get(name, {}).get(key)
            label = content["titles"][name] + (f"  ~ n^{growth:.2f}" if growth else "")
            if points:
                ax.plot(*zip(*points), label=label, **_style(name))
        ax.set(xscale="log", yscale="log", xlabel="tokens n", title=title)
        sizes = sorted({row["n"] for row in rows})
        ax.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        bottom, top = ax.get_ylim()
        lines = len(ax.get_lines())
        if lines <= 4:
            ax.set_ylim(bottom, top * (top / bottom) ** 0.4)  # room for the legend
            ax.legend(loc="upper left", frameon=False)
        else:
            ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    return figure


def draw_memory(content: dict[str, Any], path: Path) -> None:
    """The paper's figure: memory of 12 layers against the number of tokens, on plain axes."""
    figure, ax = plt.subplots(figsize=(8.2, 4.6), layout="constrained")
    for name, title in content["titles"].items():
        points = [
            (row["n"], row["training_bytes"] / 1e9)
            for row in content["rows"]
            if row["contestant"] == name and row.get("training_bytes")
        ]
        growth = content["exponents"].get(name)
        if points:
            label = title + (f"  ~ n^{growth:.2f}" if growth else "")
            ax.plot(*zip(*points), label=label, **_style(name))
    sizes = sorted({row["n"] for row in content["rows"]})
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes])
    ax.set(xlabel="tokens n", ylabel="GB", title="memory of 12 layers in training, batch 1")
    ax.grid(alpha=0.3)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    save(figure, path)


def _style(name: str) -> dict[str, Any]:
    """How a contestant is drawn: ours thick, packages dashed, others plain."""
    ours = name.endswith("softpp")
    return {
        "color": COLORS.get(name, "black"),
        "linewidth": 2.6 if ours else 1.3,
        "linestyle": "--" if name in PACKAGES else "-",
        "marker": "o",
        "markersize": 5 if ours else 3,
        "zorder": 3 if ours else 2,
    }


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
                places,
                ratios,
                0.8 / len(names),
                color=COLORS.get(name, "black"),
                label=content["titles"][name],
            )
        ax.axhline(1, color="black", linewidth=0.8, linestyle="--")
        ax.set_xticks(range(len(cases)), [f"{b} x {h} heads\nn = {n:,}" for b, h, n in cases])
        ax.set(yscale="log", title=title)
        ax.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("time, in units of SOFT++'s matrix products")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
