"""`softmaxfree bench attention` and `bench memory`: attentions alone, in time and in memory."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from tqdm import tqdm

from ..measure import memory_limit
from ..results import Note, Page, Row, Table
from .contestants import OPERATIONS, Case, Dtype, checked, find, prepare
from .runner import Benchmark, Entry, by_case, exponents, notes, only_n_differs, too_slow

OURS = ("softpp", "op_softpp")
"""What others are compared with."""

QUANTITIES = {
    "forward_s": ("Forward, ms", 1e-3),
    "training_s": ("Forward and backward, ms", 1e-3),
    "forward_bytes": ("Memory of forward, MB", 1e6),
    "training_bytes": ("Memory of forward and backward, MB", 1e6),
}
"""The heading of a table, and its unit in seconds or bytes."""


@dataclass(frozen=True)
class Preset:
    """What is measured.

    contestants: Their names; all layers and packages if there are none.
    repeats: Rounds of turns; with 0 nothing is timed.
    seconds: For one contestant at one case.
    longest: Seconds of a call; a contestant that would take longer is not run.
    """

    help: str
    cases: list[Case]
    contestants: list[str]
    repeats: int
    kinds: tuple[str, ...] = ("forward", "training")
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
        kinds=("forward",),
    ),
    "linear": Preset(
        "SOFT++ from 3,136 to a million tokens: how time and memory grow",
        [Case(1, 1, n) for n in (3136, 6272, 12544, 25088, 50176, 100352, 200704, 1_000_000)],
        ["op_softpp"],
        repeats=7,
    ),
}
MEMORY = Preset(
    "12 attention layers in training, d = 384, 12 heads, m = 49, n = 784 p",
    [Case(1, 12, 784 * p, layers=12) for p in range(1, 9)],
    [],
    repeats=0,
    kinds=("training",),
)


def bench_attention(
    preset: Literal["paper", "core", "demo", "linear"] = "core",
    contestants: list[str] | None = None,
    dtype: Dtype = "float32",
    **options: Any,
) -> Row:
    """Measure attentions alone: all of this package, other packages', the released formula.

    Contestants take turns in one process; memory is measured in a fresh process for each point.
    Only ratios within one run carry over to other machines. Prints tables and writes them as JSON,
    CSV, Markdown and, where only n differs, a picture.

    Args:
        preset: paper: every attention and the packages as layers from 784 to 6,272 tokens
            (4 minutes); core: SOFT++, the released formula and softmax at four sizes that models
            use (4 minutes); demo: softmax and SOFT++ from 784 to 50,176 tokens (1 minute);
            linear: SOFT++ from 3,136 to a million tokens (2 minutes).
        contestants: Names of attentions, such as [softpp,performer]; the preset's if not given.
        dtype: Type of tokens and weights.
        options: Those of `Benchmark`.
    """
    from ..pictures import draw_over_n  # needs matplotlib: fails before the work, not after

    bench, plan = Benchmark(**options), PRESETS[preset]
    names = checked(contestants or plan.contestants)
    rows = _measured(bench, plan, names, dtype)
    more = _about(bench, rows, names, dtype) | {"preset": preset}
    draw = draw_over_n if only_n_differs(rows) else None
    same = ["contestant", "batch", "heads", "n"]
    return bench.publish(f"attention-{preset}", rows, page, draw, same, **more)


def bench_memory(
    contestants: list[str] | None = None, dtype: Dtype = "float32", **options: Any
) -> Row:
    """Measure the memory of 12 layers in training from 784 to 6,272 tokens: the paper's figure.

    All attentions and the packages', each point in a fresh process (8 minutes). Prints a table
    with the fitted exponents and writes it as JSON, CSV, Markdown and the figure.

    Args:
        contestants: Names of attentions, such as [softpp,performer]; all if not given.
        dtype: Type of tokens and weights.
        options: Those of `Benchmark`.
    """
    from ..pictures import draw_over_n  # needs matplotlib: fails before the work, not after

    bench, names = Benchmark(**options), checked(contestants)
    rows = _measured(bench, MEMORY, names, dtype)
    more = _about(bench, rows, names, dtype)
    return bench.publish("memory", rows, memory_page, draw_over_n, ["contestant", "n"], **more)


def _measured(bench: Benchmark, plan: Preset, names: list[str], dtype: Dtype) -> list[Row]:
    """Rows of all contestants at all cases."""
    measured: list[Row] = []
    for size in tqdm(plan.cases, desc="bench", unit="case", leave=False):
        case = replace(size, device=bench.device, dtype=dtype)
        rows: list[Row] = [{**asdict(case), "contestant": name} for name in names]
        for kind in plan.kinds:
            entries = [
                Entry(
                    row,
                    partial(prepare, row["contestant"], case, kind),
                    obstacle=too_large(row["contestant"], case, kind)
                    or too_slow(measured, row, "contestant", "n", kind, plan.longest),
                )
                for row in rows
            ]
            memory = "call" if plan.memory else ""
            bench.measure(entries, kind, plan.repeats, plan.seconds, memory, f"{kind}_note")
        measured += rows
    return measured


def _about(bench: Benchmark, rows: list[Row], names: list[str], dtype: Dtype) -> Row:
    """Further fields of a result: what contestants are called, and how they grow with n."""
    # Small inputs measure the overhead of a call: of many sizes only those from 3,136 on count.
    least = 3136 if max(row["n"] for row in rows) > 16 * 784 else 0
    counted = [row for row in rows if least <= row["n"] <= 200_704]
    return {
        "device": bench.device,
        "dtype": dtype,
        "titles": {name: find(name).title for name in names},
        "exponents": exponents(counted, *QUANTITIES) if only_n_differs(rows) else {},
    }


def too_large(name: str, case: Case, kind: str) -> str:
    """Why a contestant is not run: its n x n matrices need more memory than it may take."""
    needs = find(name).needs(case, kind == "training")
    return f"not run: needs {needs / 2**30:.1f} GiB" if needs > memory_limit() else ""


def page(content: Row) -> Page:
    layers = not set(content["titles"]) <= set(OPERATIONS)
    note = f"""\
{LAYERS if layers else ALONE}
{content["dtype"]} on {content["device"]}. Best of interleaved repeats, forward without and training
with gradients of all inputs and weights; only ratios within one run carry over to other machines.
Memory is the peak beyond the inputs, measured in a fresh process."""
    return Page(f"Attention: {PRESETS[content['preset']].help}", [*_tables(content), Note(note)])


LAYERS = """\
Layers for sequences, projections included, with heads of width 32 and m = 49 landmarks or what
corresponds to them: chunks of 49 tokens and 4 rounds for Reformer, 110 features for Performer. The
packages are other people's, of the same names."""
ALONE = """\
Operations without projections, m = 49 landmarks, d = 32; where batch or heads differ, a column is
batch x heads x tokens. `softmaxfree bench speed` compares SOFT++ with its matrix products alone."""


def _tables(content: Row) -> Iterator[str | Table]:
    """Tables of each quantity, contestants by cases: values, and ratios to SOFT++'s."""
    rows, titles = content["rows"], content["titles"]
    ours = next((name for name in titles if name in OURS), "")
    for quantity, (heading, unit) in QUANTITIES.items():
        if any(row.get(quantity) for row in rows):
            yield f"{heading}:"
            yield by_case(content, "n", quantity, unit)
            if len(titles) > 1 and ours:
                yield f"The same, divided by {titles[ours]}'s:"
                yield by_case(content, "n", quantity, unit, ours)
    yield notes(content, "forward_note", ", forward")
    yield notes(content, "training_note", ", training")


def memory_page(content: Row) -> Page:
    note = f"""\
The peak of a forward pass through 12 layers with residual connections, batch 1, and of the
backward pass through the last of them, when everything kept is still there; beyond the weights
and the input. {content["dtype"]} on {content["device"]}; each point in a fresh process, which may
take half of the machine's memory. Kernels and softmax matrices that a method forms count; fused
softmax forms none."""
    table = by_case(content, "MB at n =", "training_bytes", 1e6)
    return Page(f"Memory: {MEMORY.help}", [table, notes(content, "training_note"), Note(note)])
