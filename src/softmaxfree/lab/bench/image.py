"""Whole models on one large image: cost, memory in a fresh process, time in turns, the table."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ...environment import largest_memory
from ...models.cost import Cost
from ..measure import in_fresh_process, time_interleaved
from ..results import table

SWIN = "Swin-T"


@dataclass(frozen=True)
class Entry:
    """A model to measure, by functions that a fresh process can be given.

    row: What names it in the results, its `title` included.
    build: Makes the model.
    image: Makes the image, (3, H, W).
    infer: Passes it through the model; returns what the results are to say of the outcome.
    cost: What that takes.
    """

    row: dict[str, Any]
    build: Callable[[], Any]
    image: Callable[[], Tensor]
    infer: Callable[[Any, Tensor], dict[str, Any]]
    cost: Callable[[Any, Tensor], Cost]


def measure(
    entries: Sequence[Entry], name: str, threads: int, repeats: int, seconds: float = math.inf
) -> list[dict[str, Any]]:
    """The rows of all entries with their numbers; one that runs out of memory has a note instead.

    An entry that has used up its seconds is not timed again.
    """
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], object]] = {}
    with ThreadPoolExecutor(1) as pool:
        for entry in tqdm(entries, desc=f"bench {name}", unit="model", leave=False):
            # Memory beside the counting, as neither is timed.
            module = entry.infer.__module__
            memory = pool.submit(in_fresh_process, memory_of_one, entry, threads, module=module)
            model, image = entry.build(), entry.image()
            found = entry.cost(model, image)
            row = {
                **entry.row,
                "parameters": found.parameters,
                "multiply_adds": found.multiply_adds,
                "inverse_multiply_adds": found.inverse,
            }
            rows.append(row)
            measured = memory.result()
            if measured is None:
                row["note"] = "out of memory"
                continue
            row["inference_bytes"], outcome = measured
            row |= outcome
            calls[str(len(rows) - 1)] = partial(entry.infer, model, image)
    for number, timing in time_interleaved(calls, repeats, seconds).items():
        rows[int(number)]["inference_s"] = timing.best
        rows[int(number)]["inference_median_s"] = timing.median
    return rows


def memory_of_one(entry: Entry, threads: int) -> tuple[int, dict[str, Any]]:
    """In a process of its own: the most bytes that it ever takes, and the outcome."""
    torch.set_num_threads(threads)
    outcome = entry.infer(entry.build(), entry.image())
    return largest_memory(), outcome


def report(
    rows: list[dict[str, Any]], group: str, names: Mapping[str, str], markdown: bool = False
) -> str:
    """A line for each row; times also as multiples of Swin-T's in the same group.

    Args:
        rows: As measured.
        group: Field of theirs, and title of the first column.
        names: What its values are called in the table.
        markdown: Or for a terminal.
    """
    header = [group, "backbone", "M params", "G m-adds", "inverse", "s", f"/ {SWIN}", "MB"]
    swin = {row[group]: row.get("inference_s") for row in rows if row["title"] == SWIN}
    lines = []
    for row in rows:
        seconds, peer = row.get("inference_s"), swin.get(row[group])
        lines.append(
            [
                names[row[group]],
                row["title"],
                f"{row['parameters'] / 1e6:.1f}",
                f"{row['multiply_adds'] / 1e9:.1f}",
                f"{row['inverse_multiply_adds'] / 1e9:.1f}",
                f"{seconds:.2f}" if seconds else row["note"],
                f"{seconds / peer:.2f}" if seconds and peer else "",
                f"{row['inference_bytes'] / 1e6:.0f}" if seconds else "",
            ]
        )
    return table(header, lines, 2, markdown)


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
