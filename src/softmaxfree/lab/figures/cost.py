"""`softmaxfree figures memory` and `throughput`: the cost of attention, with accuracies beside it.

Costs are results of the benchmarks; accuracies are the paper's.
"""

from pathlib import Path
from typing import Any

from ...errors import UserError
from ..paper import IMAGENET
from ..pictures import PEER_COLOR, entries, memory_panel, panel, points, style
from ..results import read
from .drawing import panels, save

COMMANDS = {
    "memory": "softmaxfree bench memory",
    "models": "softmaxfree models",
    "attention-paper": "softmaxfree bench attention --preset paper",
    "models-peers": "softmaxfree bench models --preset peers",
    "models-paper": "softmaxfree bench models --preset paper",
}
"""The command that writes each result."""

OURS = {"SOFT": "soft", "SOFT++": "softpp"}
"""Families that have the colour of an attention."""

SIDES = {
    "CoaT-Lite": "left",
    "ConViT": "left",
    "LambdaNets": "below left",
    "Linformer": "left",
    "ResNet-50": "left",
    "SOFT++": "left",
    "Swin-T": "left",
    "Transformer, fused": "below",
    "ViP": "above",
    "ViT": "below",
}
"""The side of its point where a name has room; default: right."""

LOWEST = 74.5
"""Accuracies below this, in per cent, are written at the edge."""

INK = "#333333"
NOTE: dict[str, Any] = {"fontsize": 8.5, "color": INK}

_LEADER = {"arrowstyle": "-", "linewidth": 0.7, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3}
"""The line from a name at the edge to its point."""

Row = dict[str, Any]
"""A point: its panel, its model and its two coordinates."""


def draw_memory(results: Path = Path("results"), out: Path = Path("figures")) -> None:
    """Draw memory against the number of tokens, and accuracy against parameters.

    Args:
        results: Folder with the results of `bench memory` and `models`.
        out: Folder for memory.png, memory.svg and memory.csv.
    """
    memory = _read(results, "memory", "training_bytes", "titles", "exponents")
    models = _read(results, "models", "parameters")
    rows = [*_over_n("memory", memory, "training_bytes"), *_accuracy_by_parameters(models)]
    figure, ((left, right),) = panels(2, width=5.6, height=4.7)
    memory_panel(left, memory)
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    left.legend(*entries(left), **beside, frameon=False, fontsize=9)
    _draw_families(right, [row for row in rows if row["panel"] == "accuracy"])
    figure.supxlabel(
        f"Memory: {_machine(memory)}.  Accuracies: the paper's ImageNet table, not measured here; "
        "parameters of SOFT and SOFT++ are counted here, others' as printed.",
        **NOTE,
    )
    save(figure, rows, out / "memory")


def draw_throughput(results: Path = Path("results"), out: Path = Path("figures")) -> None:
    """Draw time against the number of tokens, and accuracy against throughput.

    Args:
        results: Folder with the results of `bench attention --preset paper` and `bench models`.
        out: Folder for throughput.png, throughput.svg and throughput.csv.
    """
    attention = _read(results, "attention-paper", "forward_s", "titles", "exponents")
    peers = _read(results, "models-peers", "inference_s")
    tiny = _read(results, "models-paper", "inference_s")
    rows = [
        *_over_n("forward", attention, "forward_s"),
        *_over_n("training", attention, "training_s"),
        *_accuracy_of_peers(peers),
        *_accuracy_of_attentions(tiny),
    ]
    figure, ((forward, training), (left, right)) = panels(2, 2, width=5.4, height=3.6)
    panel(forward, attention, "forward_s")
    panel(training, attention, "training_s")
    beside = {"loc": "outside right upper", "title": "growth of the forward time:"}
    figure.legend(*entries(forward), **beside, frameon=False, fontsize=9)
    _draw_points(left, rows, "peers", "about 4.5 G multiply-adds, batch 1")
    _draw_points(right, rows, "tiny", "each attention in tiny, batch 2")
    machines: dict[str, list[str]] = {}
    for what, content in (("attention", attention), ("models", peers), ("tiny", tiny)):
        machines.setdefault(_machine(content), []).append(what)
    measured = "; ".join(f"{', '.join(what)}: {where}" for where, what in machines.items())
    note = f"Time: {measured}.\nAccuracies: the paper's tables, not measured here."
    figure.supxlabel(note, **NOTE)
    save(figure, rows, out / "throughput")


def _read(results: Path, name: str, quantity: str, *fields: str) -> dict[str, Any]:
    """Reads a result, and raises UserError with the command that writes it if it is missing."""
    path = results / f"{name}.json"
    again = f"write it with: {COMMANDS[name]} --out {results}"
    try:
        content = read(path)
    except UserError as error:
        raise UserError(f"{error}; {again}") from None
    measured = any(isinstance(row, dict) and row.get(quantity) for row in content["rows"])
    if not (measured and set(fields) <= set(content)):
        raise UserError(f"{path} is a result of something else, or of an older version; {again}")
    return content


def _machine(content: dict[str, Any]) -> str:
    """The machine of a measurement."""
    hardware, threads = content["hardware"], content["threads"]
    device = hardware.get("gpu") or f"{hardware['cpu']} ({hardware['capability']})"
    compiled = ", with compiled code" if content.get("native") else ""
    return f"{device}, {threads} thread{'s' if threads > 1 else ''}{compiled}"


def _over_n(name: str, content: dict[str, Any], quantity: str) -> list[Row]:
    return [
        {"panel": name, "contestant": contestant, "n": n, quantity: value}
        for contestant, values in points(content, quantity).items()
        for n, value in values
    ]


def _accuracy_by_parameters(models: dict[str, Any]) -> list[Row]:
    """The paper's models: parameters of SOFT and SOFT++ are counted here."""
    counted = {row["model"]: row["parameters"] for row in models["rows"] if not row["arguments"]}
    return [
        {
            "panel": "accuracy",
            "model": printed.title,
            "family": printed.family,
            "parameters_m": counted.get(printed.model, printed.parameters_m * 1e6) / 1e6,
            "parameters_from": "counted" if printed.model in counted else "paper",
            "top1": printed.top1,
        }
        for printed in IMAGENET
    ]


def _accuracy_of_peers(peers: dict[str, Any]) -> list[Row]:
    """The paper's models that were measured, at the image size of their accuracy."""
    printed = {(row.model, row.side): row for row in IMAGENET if row.model}
    rows = []
    for row in peers["rows"]:
        known = printed.get((row["model"], row["side"]))
        if known and not row["arguments"] and row.get("inference_s"):
            accuracy = {"family": known.family, "top1": known.top1}
            rows.append(_throughput("peers", row) | accuracy)
    return rows


def _accuracy_of_attentions(tiny: dict[str, Any]) -> list[Row]:
    """Every attention in the released tiny model, for which the paper has a table."""
    return [
        _throughput("tiny", row)
        | {"contestant": row["arguments"]["attention"], "top1": row["paper"]["top1"]}
        for row in tiny["rows"]
        if row["group"] == "softpp_tiny_fudan" and row["paper"] and row.get("inference_s")
    ]


def _throughput(panel: str, row: Row) -> Row:
    images_s = row["batch"] / row["inference_s"]
    return {"panel": panel, "model": row["title"], "images_s": images_s}


def _family_style(family: str) -> dict[str, Any]:
    if family in OURS:
        return style(OURS[family])
    return {"color": PEER_COLOR, "linewidth": 1, "marker": "o", "markersize": 4, "zorder": 1}


def _draw_families(ax: Any, rows: list[Row]) -> None:
    """Draws a line through the sizes of each family, with the names of large models at the edge."""
    ends: dict[str, tuple[float, float]] = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        sizes = sorted(
            (row["parameters_m"], row["top1"]) for row in rows if row["family"] == family
        )
        ax.plot(*zip(*sizes), **_family_style(family))
        ends[family] = sizes[-1]
    ax.set(xscale="log", xlim=(5.5, 115), xlabel="parameters (M)")
    ax.set(ylim=(LOWEST, 85), ylabel="top-1 accuracy (%)", title="ImageNet, the paper's accuracies")
    ax.set_xticks([10, 20, 50, 100], ["10", "20", "50", "100"])
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    for row in rows:
        if row["top1"] < LOWEST:
            text = f"{row['model']}\n{row['top1']} % ↓"
            at = row["parameters_m"], LOWEST + 0.1
            ax.text(*at, text, ha="right", va="bottom", fontsize=9, color=INK)
    place = 85.0
    for family, (x, y) in sorted(ends.items(), key=lambda end: (-end[1][1], -end[1][0])):
        if x < 60:
            _name(ax, family, x, y)
            continue
        place -= 0.43
        line = _LEADER | {"color": _family_style(family)["color"]}
        look: dict[str, Any] = {"va": "center", "fontsize": 9, "color": INK}
        look["weight"] = "bold" if family in OURS else "normal"
        beside = (1.05, place), "data", ("axes fraction", "data")
        ax.annotate(family, (x, y), *beside, arrowprops=line, **look)


def _draw_points(ax: Any, rows: list[Row], panel: str, title: str) -> None:
    """Draws accuracy against throughput, each point with its name."""
    for row in (row for row in rows if row["panel"] == panel):
        look = style(row["contestant"]) if "contestant" in row else _family_style(row["family"])
        size = 8 if look["marker"] == "o" else 9
        ax.plot(row["images_s"], row["top1"], **look | {"linestyle": "", "markersize": size})
        _name(ax, row["model"], row["images_s"], row["top1"])
    ax.margins(0.3, 0.15)
    ax.set(xlabel="images a second at 224 x 224", ylabel="top-1 accuracy (%)", title=title)
    ax.grid(alpha=0.3)


def _name(ax: Any, name: str, x: float, y: float) -> None:
    """Writes a name beside a point."""
    shift, across, up = {
        "right": ((7, 0), "left", "center"),
        "left": ((-7, 0), "right", "center"),
        "above": ((0, 5), "center", "bottom"),
        "below": ((4, -4), "left", "top"),
        "below left": ((2, -4), "right", "top"),
    }[SIDES.get(name, "right")]
    ax.annotate(
        name, (x, y), shift, textcoords="offset points", ha=across, va=up, fontsize=9, color=INK
    )
