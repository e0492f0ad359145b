"""What all benchmarks share: their options, contestants in turns, two kinds of table."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from ...environment import command_line, largest_memory
from ...imports import Names, import_modules
from ...models.cost import Cost
from ..measure import check_machine, exponent, in_fresh_process, peak_memory, time_interleaved
from ..results import THREE, Column, Page, Row, Table, columns, publish, read, result

Call = Callable[[], object]
Device = Literal["cpu", "cuda"]
CANNOT_RUN = (ValueError, TypeError, AssertionError, RuntimeError)
SWIN = "Swin-T"
GROWING = {"ratios": [8, 4, 2, 1]}
"""Options with which the number of landmarks grows with the image, as in the released models."""


@dataclass(frozen=True)
class Entry:
    """A contestant at one size.

    row: Fields that name it in the results; `Benchmark.measure` adds its numbers.
    prepare: Returns the call to measure, here or in a fresh process: a partial of a function of a
        module, so that it can be sent there.
    count: Returns what a call that was prepared costs; not counted without it.
    obstacle: Why it is not run, if that is known beforehand.
    """

    row: Row
    prepare: partial[Any]
    count: Callable[[Any], Cost] | None = None
    obstacle: str = ""


class Benchmark:
    """Contestants that take turns on this machine, and the files of their result.

    A command passes its `**options` on to it, so that these are options of the command as well.

    Args:
        threads: Threads to compute with; ratios are most reliable with 1.
        out: Folder for the results.
        modules: Python modules to import first, which register attentions of your own.
        device: Device to compute on.
        against: A .json file of an earlier run to compare with.
    """

    def __init__(
        self,
        threads: int = 1,
        out: Path = Path("results"),
        modules: Names = None,
        device: Device = "cpu",
        against: Path | None = None,
    ) -> None:
        check_machine(threads, device)
        self.earlier = None if against is None else read(against)  # may be written over at the end
        import_modules(modules)
        torch.set_num_threads(threads)
        self.out, self.modules, self.device = out, modules, device

    def measure(
        self,
        entries: Sequence[Entry],
        kind: str,
        repeats: int,
        seconds: float = math.inf,
        memory: str = "",
        note: str = "note",
    ) -> list[Row]:
        """Adds cost, memory and time to the rows of entries that take turns, and returns the rows.

        The fields are `{kind}_bytes`, `{kind}_s` and `{kind}_median_s`. If a call returns a
        dictionary, that is added too. An entry that cannot run gets the reason as its note instead.

        Args:
            entries: Contestants.
            kind: What the calls do, such as `inference`.
            repeats: Rounds of turns; with 0 nothing is timed.
            seconds: After so long an entry gets no further turn.
            memory: "call" measures memory beyond what a process has before the call, "process" all
                memory of a process, libraries and weights included; not measured if empty.
            note: The field for the reason.
        """
        calls: dict[str, Call] = {}
        progress = tqdm(entries, desc=kind, unit="model", leave=False, disable=len(entries) == 1)
        for position, entry in enumerate(progress):
            row = entry.row
            if entry.obstacle:
                row[note] = entry.obstacle
                continue
            try:
                call = entry.prepare() if repeats else None
                if entry.count is not None:
                    cost = entry.count(call)
                    row |= {"parameters": cost.parameters, "multiply_adds": cost.multiply_adds}
                    row["inverse_multiply_adds"] = cost.inverse
            except CANNOT_RUN as error:
                row[note] = f"cannot run: {str(error).splitlines()[0]}"
                continue
            if memory:
                found = in_fresh_process(
                    memory_of_call, entry.prepare, memory, self.device, self.modules,
                    torch.get_num_threads(), module=entry.prepare.func.__module__,
                )  # fmt: skip
                row[f"{kind}_bytes"] = None if found is None else found[0]
                if found is None:
                    row[note] = "out of memory"
                    continue
                row |= found[1]
            if call is not None:
                calls[str(position)] = call
        for key, timing in time_interleaved(calls, repeats, seconds, self.device).items():
            row = entries[int(key)].row
            row[f"{kind}_s"], row[f"{kind}_median_s"] = timing.best, timing.median
        return [entry.row for entry in entries]

    def publish(
        self,
        name: str,
        rows: list[Row],
        page: Callable[[Row], Page],
        draw: Callable[[Row, Path], None] | None = None,
        same: Sequence[str] = (),
        **more: Any,
    ) -> Row:
        """Prints and writes the result, see `results.publish`; `more` are further fields of it."""
        content = result(command_line(), rows, **more)
        return publish(self.out / name, content, page, draw, self.earlier, same)


def memory_of_call(
    prepare: Callable[[], Call], memory: str, device: str, modules: Names, threads: int
) -> tuple[int, Row]:
    """Runs in a fresh process: bytes of a call at its peak, and what it says of its outcome."""
    torch.set_num_threads(threads)
    import_modules(modules)
    call = prepare()
    if memory == "call":
        return peak_memory(call, device), {}
    outcome = call()
    taken = torch.cuda.max_memory_allocated() if device == "cuda" else largest_memory()
    return taken, outcome if isinstance(outcome, dict) else {}


def too_slow(
    rows: list[Row], row: Row, same: str, size: str, kind: str, longest: float, power: int = 2
) -> str:
    """Why a row is not measured: its call would take longer than `longest` seconds.

    Its time is extrapolated from the rows measured before, of the same contestant: it grows with
    the size, a number of tokens, to the power 2, or with the side of an image to the power 4.
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


def by_case(content: Row, heading: str, quantity: str, unit: float, ours: str = "") -> Table:
    """A quantity by contestant and case, with the exponent of its growth with n.

    With `ours`, values are multiples of that contestant's.
    """
    case = "{n}" if only_n_differs(content["rows"]) else "{batch} x {heads} x {n}"
    values = {(row["contestant"], case.format(**row)): row.get(quantity) for row in content["rows"]}
    growth = {} if ours else content["exponents"]

    def at(where: str) -> Column:
        own = values.get((ours, where)) if ours else unit

        def value(row: Row) -> float | str:
            found = values[row["name"], where]
            return found / own if found and own else "-"

        return Column(where, value, 2 if ours else THREE)

    return columns(
        [
            {"name": name, "title": title}
            for name, title in content["titles"].items()
            if name != ours
        ],
        Column(heading, "title"),
        *(at(where) for where in dict.fromkeys(where for _, where in values)),
        Column("~ n^", lambda row: growth.get(row["name"], {}).get(quantity), 2),
    )


def only_n_differs(rows: list[Row]) -> bool:
    return len({(row["batch"], row["heads"]) for row in rows}) == 1


def notes(content: Row, key: str = "note", kind: str = "") -> str:
    """Why contestants have no numbers, a line each."""
    return "\n".join(
        f"{content['titles'][row['contestant']]}{kind}, n = {row['n']}: {row[key]}"
        for row in content["rows"]
        if key in row
    )


def image_table(rows: list[Row], group: str, names: Mapping[str, str]) -> Table:
    """Models on one large image, with the time as a multiple of Swin-T's in the same group.

    Args:
        rows: As measured.
        group: Field of the rows, and heading of the first column.
        names: What the table calls the values of that field.
    """
    swin = {row[group]: row for row in rows if row["title"] == SWIN}
    return columns(
        rows,
        Column(group, lambda row: names[row[group]]),
        Column("backbone", "title"),
        Column("M params", "parameters", 1, 1e6),
        Column("G m-adds", "multiply_adds", 1, 1e9),
        Column("inverse", "inverse_multiply_adds", 1, 1e9),
        Column("s", "inference_s", 2),
        Column(f"/ {SWIN}", lambda x: x["inference_s"] / swin[x[group]]["inference_s"], 2),
        Column("MB", "inference_bytes", 0, 1e6),
    )
