"""`softmaxfree bench attention`: attentions alone, in time and in memory."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ...environment import command_line
from ...imports import import_modules
from ..measure import (
    exponents,
    in_fresh_process,
    memory_limit,
    peak_memory,
    square_product,
    time_interleaved,
)
from ..results import comparison, provenance, read, result, table, write
from .contestants import (
    CPU,
    OPERATIONS,
    PACKAGES,
    VARIANTS,
    Case,
    Setting,
    find,
    layer_names,
    verify,
)

OURS = ("softpp", "op_softpp")
"""What others are compared with."""


@dataclass(frozen=True)
class Preset:
    """What is measured: cases, contestants, and how often."""

    help: str
    cases: list[Case]
    contestants: list[str]
    repeats: int
    backward: bool = True
    memory: bool = True
    seconds: float = 10.0
    """For one contestant at one case."""
    longest: float = math.inf
    """Seconds of a call: one that is expected to take longer is not run, and said so."""


PRESETS = {
    "paper": Preset(
        "every attention and its packages as a layer, d = 384, 12 heads, m = 49, n = 784 p",
        [Case(1, 12, 784 * p) for p in range(1, 9)],
        [],  # all of them
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


def run(
    preset: str,
    threads: int | None,
    out: Path,
    memory: bool | None = None,
    contestants: list[str] | None = None,
    modules: list[str] | None = None,
    setting: Setting = CPU,
    against: Path | None = None,
) -> dict[str, Any]:
    """Measures a preset; writes its JSON, CSV, Markdown and picture; prints the tables."""
    from ..pictures import draw_attention  # needs matplotlib: said before, not after, the work

    earlier = None if against is None else read(against)  # it may be written over
    import_modules(modules or [])
    plan = PRESETS[preset]
    names = contestants or plan.contestants or [*layer_names(), *VARIANTS, *PACKAGES]
    if threads is not None:
        torch.set_num_threads(threads)
    verify(names)
    measure = _Measure(
        plan, names, modules or [], plan.memory if memory is None else memory, setting
    )
    work = tqdm(plan.cases, desc=f"bench attention, {preset}", unit="case", leave=False)
    rows = [row for case in work for row in measure(case)]
    content = result(
        command_line(),
        rows,
        preset=preset,
        **asdict(setting),
        titles={name: find(name).title for name in names},
    )
    content["exponents"] = _exponents(rows)
    stem = out / f"attention-{preset}"
    write(stem, content, markdown(content))
    draw_attention(content, stem.with_suffix(".png"))
    print(report(content))
    if earlier is not None:
        same = ["contestant", "batch", "heads", "n"]
        print("\n" + comparison(content, earlier, same, ("forward_s", "training_s")))
    print(f"\nwritten: {stem}.json, .csv, .md and .png")
    return content


@dataclass(frozen=True)
class _Measure:
    plan: Preset
    names: list[str]
    modules: list[str]
    memory: bool
    setting: Setting
    slowest: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """By name and kind: tokens and seconds of the last call."""

    def __call__(self, case: Case) -> list[dict[str, Any]]:
        rows = {name: {**asdict(case), "contestant": name} for name in self.names}
        kinds = ["forward", "training"] if self.plan.backward else ["forward"]
        for kind in kinds:
            self._measure(case, kind, rows)
        return list(rows.values())

    def _measure(self, case: Case, kind: str, rows: dict[str, dict[str, Any]]) -> None:
        calls: dict[str, Any] = {}
        for name, row in rows.items():
            needs = find(name).needs(case, kind == "training")
            if needs > memory_limit():
                row[f"{kind}_note"] = f"not run: needs {needs / 2**30:.1f} GiB"
                continue
            n, seconds = self.slowest.get((name, kind), (case.n, 0.0))
            expected = seconds * (case.n / n) ** 2
            if expected > self.plan.longest:
                row[f"{kind}_note"] = f"not run: a call would take about {expected:.0f} s"
                continue
            if self.memory:
                row[f"{kind}_bytes"] = in_fresh_process(
                    memory_of_one_point, case, name, kind, self.setting, self.modules,
                    torch.get_num_threads(),
                )  # fmt: skip
                if row[f"{kind}_bytes"] is None:
                    row[f"{kind}_note"] = "out of memory"
                    continue
            try:
                ready = find(name).ready(case, self.setting)
            except (ValueError, AssertionError, RuntimeError) as error:
                row[f"{kind}_note"] = f"cannot run: {error}"
                continue
            calls[name] = ready.forward if kind == "forward" else ready.train
        product, operations = square_product(**asdict(self.setting))
        timings = time_interleaved(
            {"": product} | calls, self.plan.repeats, self.plan.seconds, self.setting.device
        )
        rate = operations / timings.pop("").best
        for name, timing in timings.items():
            self.slowest[name, kind] = (case.n, timing.best)
            rows[name][f"{kind}_s"] = timing.best
            rows[name][f"{kind}_median_s"] = timing.median
            rows[name]["products_s"] = case.products() / rate


def _exponents(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How each quantity grows with n, where the cases differ in n alone."""
    if len({(row["batch"], row["heads"]) for row in rows}) > 1:
        return {}
    # Small inputs measure the start: of many sizes those from 3,136 tokens on count.
    least = 3136 if max(row["n"] for row in rows) > 16 * 784 else 0
    rows = [row for row in rows if least <= row["n"] <= 200_704]
    found: dict[str, dict[str, float]] = {}
    for quantity in QUANTITIES:
        for name, power in exponents(rows, quantity).items():
            found.setdefault(name, {})[quantity] = power
    return found


QUANTITIES = {
    "forward_s": "time",
    "training_s": "f+b time",
    "forward_bytes": "memory",
    "training_bytes": "f+b memory",
}


def report(content: dict[str, Any], markdown: bool = False) -> str:
    """A line for each contestant and case; of layers over n, columns for the cases."""
    if len({(row["batch"], row["heads"]) for row in content["rows"]}) == 1 and _are_layers(content):
        return over_n(content, markdown)
    return by_case(content, markdown)


def _are_layers(content: dict[str, Any]) -> bool:
    return not set(content["titles"]) <= set(OPERATIONS)


def over_n(content: dict[str, Any], markdown: bool = False) -> str:
    """Tables of one quantity each: contestants by the number of tokens, and the exponent."""
    rows = content["rows"]
    sizes = list(dict.fromkeys(row["n"] for row in rows))
    parts = []
    notes: dict[str, str] = {}
    for key, title, unit in (
        ("forward_s", "Forward, ms", 1e-3),
        ("training_s", "Forward and backward, ms", 1e-3),
        ("forward_bytes", "Memory of forward, MB", 1e6),
        ("training_bytes", "Memory of forward and backward, MB", 1e6),
    ):
        if not any(row.get(key) for row in rows):
            continue
        values = {(row["contestant"], row["n"]): row.get(key) for row in rows}
        ours = next((name for name in OURS if name in content["titles"]), None)
        lines = []
        for name, shown in content["titles"].items():
            growth = content["exponents"].get(name, {}).get(key)
            cells = [_cell(values[name, n], unit) for n in sizes]
            lines.append([shown, *cells, f"{growth:.2f}" if growth else ""])
        parts += [f"{title}:", "", table(["n", *map(str, sizes), "~ n^"], lines, 1, markdown), ""]
        if ours:
            lines = [
                [shown, *(_ratio(values[name, n], values[ours, n]) for n in sizes)]
                for name, shown in content["titles"].items()
                if name != ours
            ]
            parts += [f"The same, divided by {content['titles'][ours]}'s:", ""]
            parts += [table(["n", *map(str, sizes)], lines, 1, markdown), ""]
    for row in rows:
        for kind in ("forward", "training"):
            if f"{kind}_note" in row:
                title = content["titles"][row["contestant"]]
                notes.setdefault(f"{title}, {kind}, n = {row['n']}", row[f"{kind}_note"])
    parts += [f"{what}: {note}" for what, note in notes.items()]
    return "\n".join(parts).rstrip()


def _cell(value: float | None, unit: float) -> str:
    if value is None:
        return "-"
    value /= unit
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(value: float | None, own: float | None) -> str:
    return f"{value / own:.2f}" if value and own else "-"


def by_case(content: dict[str, Any], markdown: bool = False) -> str:
    """The table: times in ms, ratios to SOFT++, memory in MB."""
    rows, titles = content["rows"], content["titles"]
    ours = {_case_key(row): row for row in rows if row["contestant"] in OURS}
    training = any("training_s" in row for row in rows)
    memory = any("forward_bytes" in row for row in rows)
    header = ["batch, heads, n", "attention", "ms", "x ours"]
    header += ["f+b ms", "x ours"] if training else []
    header += (["MB", "f+b MB"] if training else ["MB"]) if memory else []
    header += ["x products"]
    lines = []
    for row in rows:
        own = ours.get(_case_key(row), {})
        line = [", ".join(f"{x:,}" for x in _case_key(row)), titles[row["contestant"]]]
        if "forward_note" in row:
            lines.append([*line, row["forward_note"], *[""] * (len(header) - 3)])
            continue
        for key in ("forward_s", "training_s") if training else ("forward_s",):
            line += [_cell(row.get(key), 1e-3), _ratio(row.get(key), own.get(key))]
        if memory:
            keys = ("forward_bytes", "training_bytes") if training else ("forward_bytes",)
            line += ["-" if row.get(key) is None else f"{row[key] / 1e6:.1f}" for key in keys]
        bare = f"{row['forward_s'] / row['products_s']:.2f}"
        if "training_s" in row:
            # The backward pass has six products to the forward pass's three.
            bare += f", {row['training_s'] / (3 * row['products_s']):.2f}"
        lines.append([*line, bare if row["contestant"] in OURS else ""])
    text = table(header, lines, 2, markdown)
    growth = [
        f"{titles[name]}: " + ", ".join(f"{QUANTITIES[key]} n^{p:.2f}" for key, p in found.items())
        for name, found in content["exponents"].items()
    ]
    return "\n".join([text, *(["", *growth] if growth else [])])


def _case_key(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["batch"], row["heads"], row["n"]


def markdown(content: dict[str, Any]) -> str:
    what = (
        "Layers for sequences, projections included, with heads of width 32 and m = 49 landmarks "
        "or what corresponds to them: chunks of 49 tokens and 4 rounds for Reformer, 110 "
        "features for Performer. The packages are other people's, of the same names."
        if _are_layers(content)
        else 'Operations without projections, m = 49 landmarks, d = 32. "x products" is SOFT++\'s '
        "time divided by that of its large matrix products alone (three forward, nine in all) at "
        "the rate of a 1024 x 1024 product in the same run."
    )
    return f"""\
# Attention: {PRESETS[content["preset"]].help}

{provenance(content)}

{report(content, markdown=True)}

{what} {content["dtype"]} on {content["device"]}. Best of interleaved repeats, forward without and
training with gradients of all inputs and weights; only ratios within one run carry over to other
machines. Memory is the peak beyond the inputs, measured in a fresh process.
"""


def memory_of_one_point(
    case: Case, name: str, kind: str, setting: Setting, modules: list[str], threads: int
) -> int:
    """In a process of its own: what one contestant takes for one case.

    Of several layers the backward pass stops after the last one, which comes first, when all that
    was kept is still there.
    """
    torch.set_num_threads(threads)
    import_modules(modules)
    contestant = find(name)

    def call(case: Case) -> Any:
        ready = contestant.ready(case, setting)
        if kind == "forward":
            return ready.forward
        return ready.train if case.layers == 1 else ready.train_last

    small = Case(1, case.heads, 196, case.m, case.d)
    call(small)()  # libraries are loaded, buffers of theirs made
    return peak_memory(call(case), setting.device)
