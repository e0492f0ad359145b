"""`softmaxfree bench attention`: attentions alone, in time and in memory."""

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from ...environment import command_line
from ...imports import Names
from ..measure import memory_limit, square_product
from ..results import Note, Page, Table, number, publish, result
from .contestants import OPERATIONS, Case, Device, Dtype, Setting, find, prepare, verified
from .runner import (
    Entry,
    Plan,
    Row,
    exponents,
    measure_in_turns,
    notes,
    over_n,
    significant,
    start,
    too_slow,
)

OURS = ("softpp", "op_softpp")
"""What others are compared with."""

QUANTITIES = {
    "forward_s": ("time", "Forward, ms", 1e-3),
    "training_s": ("f+b time", "Forward and backward, ms", 1e-3),
    "forward_bytes": ("memory", "Memory of forward, MB", 1e6),
    "training_bytes": ("f+b memory", "Memory of forward and backward, MB", 1e6),
}
"""A short name, the heading of a table, and its unit in seconds or bytes."""


@dataclass(frozen=True)
class Preset:
    """What is measured.

    contestants: Their names; all layers and packages if there are none.
    seconds: For one contestant at one case.
    longest: Seconds of a call; a contestant that would take longer is not run.
    """

    help: str
    cases: list[Case]
    contestants: list[str]
    repeats: int
    backward: bool = True
    memory: bool = True
    seconds: float = 10.0
    longest: float = math.inf


PRESETS = {
    "paper": Preset(
        "every attention and its packages as a layer, d = 384, 12 heads, m = 49, n = 784 p",
        [Case(1, 12, 784 * p) for p in range(1, 9)],
        [],
        repeats=3,
        memory=False,
        seconds=0.5,
        longest=8.0,
    ),
    "core": Preset(
        "SOFT++ against the released formula and softmax, where models use it",
        [Case(1, 2, 3136), Case(8, 2, 3136), Case(8, 10, 196), Case(1, 12, 6272)],
        ["op_softpp", "op_released", "op_released_lean", "op_sdpa"],
        repeats=15,
    ),
    "demo": Preset(
        "time and memory of softmax and SOFT++ from 28 x 28 to 224 x 224 tokens",
        [Case(1, 1, side * side) for side in (28, 56, 112, 224)],
        ["op_softpp", "op_sdpa", "op_softmax"],
        repeats=5,
        backward=False,
    ),
    "linear": Preset(
        "SOFT++ from 3,136 to a million tokens: how time and memory grow",
        [Case(1, 1, n) for n in (3136, 6272, 12544, 25088, 50176, 100352, 200704, 1_000_000)],
        ["op_softpp"],
        repeats=7,
    ),
}


def bench_attention(
    preset: Literal["paper", "core", "demo", "linear"] = "core",
    threads: int = 1,
    out: Path = Path("results"),
    contestants: list[str] | None = None,
    modules: Names = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    against: Path | None = None,
) -> Row:
    """Measure attentions alone: all of this package, other packages', the released formula.

    Each contestant is first checked against a formula. Contestants take turns in one process;
    memory is measured in a fresh process for each point. Only ratios within one run carry over to
    other machines. Prints tables and writes them as JSON, CSV, Markdown and a picture.

    Args:
        preset: paper: every attention and the packages as layers from 784 to 6,272 tokens
            (4 minutes); core: SOFT++, the released formula and softmax at four sizes that models
            use (4 minutes); demo: softmax and SOFT++ from 784 to 50,176 tokens (1 minute);
            linear: SOFT++ from 3,136 to a million tokens (2 minutes).
        threads: Threads to compute with; ratios are most reliable with 1.
        out: Folder for the results.
        contestants: Names of attentions, such as [softpp,performer]; the preset's if not given.
        modules: Python modules to import first, which register attentions of your own.
        device: Device to compute on.
        dtype: Type of tokens and weights.
        against: A .json file of an earlier run to compare with.
    """
    from ..pictures import draw_attention  # needs matplotlib: fails before the work, not after

    earlier = start(threads, device, modules, against)
    plan, setting = PRESETS[preset], Setting(device, dtype)
    names = verified(contestants or plan.contestants)
    rows: list[Row] = []
    for case in tqdm(plan.cases, desc=f"bench attention, {preset}", unit="case", leave=False):
        rows += _measure(case, names, plan, setting, modules, rows)
    titles = {name: find(name).title for name in names}
    content = result(command_line(), rows, preset=preset, **asdict(setting), titles=titles)
    content["exponents"] = _exponents(rows)
    same = ["contestant", "batch", "heads", "n"]
    return publish(out / f"attention-{preset}", content, page, draw_attention, earlier, same)


def _measure(
    case: Case, names: list[str], plan: Preset, setting: Setting, modules: Names, before: list[Row]
) -> list[Row]:
    """Rows of all contestants for one case."""
    rows = [{**asdict(case), "contestant": name} for name in names]
    memory = "call" if plan.memory else ""
    how = Plan(plan.repeats, plan.seconds, memory, setting.device, modules)
    product, operations = square_product(**asdict(setting))
    for kind in ("forward", "training") if plan.backward else ("forward",):
        entries = [
            Entry(
                row,
                partial(prepare, row["contestant"], case, kind, setting),
                obstacle=too_large(row["contestant"], case, kind)
                or too_slow(before, row, "contestant", "n", kind, plan.longest),
            )
            for row in rows
        ]
        beside = measure_in_turns(entries, kind, how, f"{kind}_note", {"product": product})
        for row in rows:
            if f"{kind}_s" in row:
                row["products_s"] = case.products() * beside["product"].best / operations
    return rows


def too_large(name: str, case: Case, kind: str) -> str:
    """Why a contestant is not run: its n x n matrices need more memory than it may take."""
    needs = find(name).needs(case, kind == "training")
    return f"not run: needs {needs / 2**30:.1f} GiB" if needs > memory_limit() else ""


def _exponents(rows: list[Row]) -> dict[str, dict[str, float]]:
    """How each quantity grows with n, where the cases differ in n alone."""
    if len({(row["batch"], row["heads"]) for row in rows}) > 1:
        return {}
    # Small inputs measure the overhead of a call: of many sizes only those from 3,136 on count.
    least = 3136 if max(row["n"] for row in rows) > 16 * 784 else 0
    counted = [row for row in rows if least <= row["n"] <= 200_704]
    return exponents(counted, *QUANTITIES)


def page(content: Row) -> Page:
    layers = not set(content["titles"]) <= set(OPERATIONS)
    over_sizes = len({(row["batch"], row["heads"]) for row in content["rows"]}) == 1
    parts = _by_size(content) if layers and over_sizes else _by_case(content)
    what = (
        "Layers for sequences, projections included, with heads of width 32 and m = 49 landmarks "
        "or what corresponds to them: chunks of 49 tokens and 4 rounds for Reformer, 110 "
        "features for Performer. The packages are other people's, of the same names."
        if layers
        else 'Operations without projections, m = 49 landmarks, d = 32. "x products" is SOFT++\'s '
        "time divided by that of its large matrix products alone (three forward, nine in all) at "
        "the rate of a 1024 x 1024 product in the same run."
    )
    note = f"""\
{what} {content["dtype"]} on {content["device"]}. Best of interleaved repeats, forward without and
training with gradients of all inputs and weights; only ratios within one run carry over to other
machines. Memory is the peak beyond the inputs, measured in a fresh process."""
    return Page(f"Attention: {PRESETS[content['preset']].help}", [*parts, Note(note)])


def _by_size(content: Row) -> list[str | Table]:
    """A table for each quantity: contestants by the number of tokens; ratios to SOFT++'s."""
    parts: list[str | Table] = []
    ours = next((name for name in content["titles"] if name in OURS), None)
    for quantity, (_, heading, unit) in QUANTITIES.items():
        values = {(row["contestant"], row["n"]): row.get(quantity) for row in content["rows"]}
        if not any(values.values()):
            continue
        parts += [f"{heading}:", over_n(content, "n", quantity, unit)]
        if ours is not None:
            sizes = list(dict.fromkeys(n for _, n in values))
            lines = [
                [title, *(_ratio(values[name, n], values[ours, n]) for n in sizes)]
                for name, title in content["titles"].items()
                if name != ours
            ]
            parts.append(f"The same, divided by {content['titles'][ours]}'s:")
            parts.append(Table(["n", *map(str, sizes)], lines))
    why = [*notes(content, "forward_note", ", forward")]
    why += notes(content, "training_note", ", training")
    return [*parts, *(["\n".join(why)] if why else [])]


def _ratio(value: float | None, own: float | None) -> str:
    return f"{value / own:.2f}" if value and own else "-"


def _by_case(content: Row) -> list[str | Table]:
    """A line for each case and contestant: ms, ratios to SOFT++, MB; then how they grow."""
    rows, titles = content["rows"], content["titles"]
    ours = {_case_key(row): row for row in rows if row["contestant"] in OURS}
    kinds = [kind for kind in ("forward", "training") if any(f"{kind}_s" in row for row in rows)]
    memory = any("forward_bytes" in row for row in rows)
    short = {"forward": "", "training": "f+b "}
    header = ["batch, heads, n", "attention"]
    header += [title for kind in kinds for title in (f"{short[kind]}ms", "x ours")]
    header += [f"{short[kind]}MB" for kind in kinds] if memory else []
    header += ["x products"]
    lines = []
    for row in rows:
        line = [", ".join(f"{x:,}" for x in _case_key(row)), titles[row["contestant"]]]
        if "forward_note" in row:
            lines.append([*line, row["forward_note"], *[""] * (len(header) - 3)])
            continue
        own = ours.get(_case_key(row), {})
        for kind in kinds:
            seconds = row.get(f"{kind}_s")
            line += [significant(seconds, 1e-3), _ratio(seconds, own.get(f"{kind}_s"))]
        line += [number(row.get(f"{k}_bytes"), 1, 1e6, "-") for k in kinds] if memory else []
        # The backward pass has six products to the forward pass's three.
        passes = {"forward_s": 1, "training_s": 3}
        bare = [f"{row[k] / (n * row['products_s']):.2f}" for k, n in passes.items() if k in row]
        lines.append([*line, ", ".join(bare) if row["contestant"] in OURS else ""])
    growth = [
        f"{titles[name]}: "
        + ", ".join(f"{QUANTITIES[key][0]} n^{p:.2f}" for key, p in found.items())
        for name, found in content["exponents"].items()
    ]
    return [Table(header, lines, 2), *(["\n".join(growth)] if growth else [])]


def _case_key(row: Row) -> tuple[int, int, int]:
    return row["batch"], row["heads"], row["n"]
