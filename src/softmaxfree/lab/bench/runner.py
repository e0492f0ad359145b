"""What all benchmarks share: the start of a command, contestants in turns, tables over n."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ...environment import largest_memory
from ...imports import Names, import_modules
from ...models.cost import Cost
from ..measure import (
    Timing,
    check_machine,
    exponent,
    in_fresh_process,
    peak_memory,
    time_interleaved,
)
from ..results import Table, number, read

Row = dict[str, Any]
Call = Callable[[], object]
CANNOT_RUN = (ValueError, TypeError, AssertionError, RuntimeError)


def start(
    threads: int, device: str = "cpu", modules: Names = None, against: Path | None = None
) -> Row | None:
    """Begins a benchmark: sets the threads, imports modules, reads the result to compare with.

    That one is read first, as the new result may overwrite its file.
    """
    check_machine(threads, device)
    earlier = None if against is None else read(against)
    import_modules(modules)
    torch.set_num_threads(threads)
    return earlier


@dataclass(frozen=True)
class Entry:
    """A contestant at one size.

    row: Fields that name it in the results; `measure_in_turns` adds its numbers.
    prepare: Returns the call to measure, here or in a fresh process: a partial of a function of a
        module, so that it can be sent there.
    count: Returns what a call that was prepared costs; not counted without it.
    obstacle: Why it is not run, if that is known beforehand.
    """

    row: Row
    prepare: partial[Any]
    count: Callable[[Any], Cost] | None = None
    obstacle: str = ""


@dataclass(frozen=True)
class Plan:
    """How entries are measured.

    repeats: Rounds of turns; with 0 nothing is timed.
    seconds: After so long an entry gets no further turn.
    memory: "call" measures memory beyond what a process has before the call, "process" all memory
        of a process, libraries and weights included; not measured if empty.
    """

    repeats: int
    seconds: float = math.inf
    memory: str = ""
    device: str = "cpu"
    modules: Names = None


def measure_in_turns(
    entries: Sequence[Entry],
    kind: str,
    plan: Plan,
    note: str = "note",
    beside: dict[str, Call] | None = None,
) -> dict[str, Timing]:
    """Adds cost, memory and time to the rows of entries that take turns.

    The fields are `{kind}_bytes`, `{kind}_s` and `{kind}_median_s`. If a call returns a dictionary,
    that is added too. An entry that cannot run gets the reason as its `note` instead.

    Returns:
        Timings of the calls `beside`, which take turns with the entries.
    """
    calls: dict[str, Call] = dict(beside or {})
    progress = tqdm(entries, desc=kind, unit="model", leave=False, disable=len(entries) == 1)
    for position, entry in enumerate(progress):
        row = entry.row
        if entry.obstacle:
            row[note] = entry.obstacle
            continue
        try:
            call = entry.prepare() if plan.repeats else None
            row |= {} if entry.count is None else _counted(entry.count(call))
        except CANNOT_RUN as error:
            row[note] = f"cannot run: {str(error).splitlines()[0]}"
            continue
        if plan.memory:
            found = in_fresh_process(
                memory_of_call, entry.prepare, plan, torch.get_num_threads(),
                module=entry.prepare.func.__module__,
            )  # fmt: skip
            row[f"{kind}_bytes"] = None if found is None else found[0]
            if found is None:
                row[note] = "out of memory"
                continue
            row |= found[1]
        if call is not None:
            calls[str(position)] = call
    timings = time_interleaved(calls, plan.repeats, plan.seconds, plan.device)
    others = {name: timings.pop(name) for name in beside or {}}
    for key, timing in timings.items():
        row = entries[int(key)].row
        row[f"{kind}_s"], row[f"{kind}_median_s"] = timing.best, timing.median
    return others


def _counted(cost: Cost) -> Row:
    return {
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds,
        "inverse_multiply_adds": cost.inverse,
    }


def memory_of_call(prepare: Callable[[], Call], plan: Plan, threads: int) -> tuple[int, Row]:
    """Runs in a fresh process: bytes of a call at its peak, and what it says of its outcome."""
    torch.set_num_threads(threads)
    import_modules(plan.modules)
    call = prepare()
    if plan.memory == "call":
        return peak_memory(call, plan.device), {}
    outcome = call()
    cuda = plan.device == "cuda"
    taken = torch.cuda.max_memory_allocated() if cuda else largest_memory()
    return taken, outcome if isinstance(outcome, dict) else {}


def too_slow(
    rows: list[Row], row: Row, same: str, size: str, kind: str, longest: float, power: int = 2
) -> str:
    """Why a row is not measured: a call would take too long, if its time is quadratic.

    Args:
        rows: Those measured before.
        row: The one that comes next.
        same: The field that names a contestant.
        size: The field with the number of tokens, or with the side of an image.
        kind: Whose `{kind}_s` is looked at.
        longest: Seconds that a call may take.
        power: Of the size that time is assumed to grow with: 2 for tokens, 4 for a side.
    """
    seconds = [
        before[f"{kind}_s"] * (row[size] / before[size]) ** power
        for before in rows
        if before[same] == row[same] and f"{kind}_s" in before
    ]
    expected = max(seconds, default=0.0)
    return f"not run: a call would take about {expected:.0f} s" if expected > longest else ""


def exponents(rows: list[Row], *quantities: str) -> dict[str, dict[str, float]]:
    """How quantities grow with n, by contestant, where there is more than one n."""
    found: dict[str, dict[str, float]] = {}
    for quantity in quantities:
        points: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row.get(quantity):
                points.setdefault(row["contestant"], []).append((row["n"], row[quantity]))
        for name, measured in points.items():
            if len(measured) > 1:
                found.setdefault(name, {})[quantity] = exponent(*zip(*measured))
    return found


def over_n(content: Row, heading: str, quantity: str, unit: float) -> Table:
    """A quantity by contestant and number of tokens, with the exponent of its growth."""
    values = {(row["contestant"], row["n"]): row.get(quantity) for row in content["rows"]}
    sizes = list(dict.fromkeys(n for _, n in values))
    lines = []
    for name, title in content["titles"].items():
        growth = content["exponents"].get(name, {}).get(quantity)
        cells = [significant(values[name, n], unit) for n in sizes]
        lines.append([title, *cells, number(growth, 2)])
    return Table([heading, *map(str, sizes), "~ n^"], lines)


def significant(value: float | None, unit: float) -> str:
    """A number in a unit, with a decimal below 100."""
    return number(value, 1 if value and value < 100 * unit else 0, unit, "-")


def notes(content: Row, key: str = "note", kind: str = "") -> list[str]:
    """Why contestants have no numbers, a line each."""
    return [
        f"{content['titles'][row['contestant']]}{kind}, n = {row['n']}: {row[key]}"
        for row in content["rows"]
        if key in row
    ]
