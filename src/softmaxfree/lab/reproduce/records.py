"""Training runs of the contestants, and `runs.jsonl` with a line for each finished run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DivergedError
from ...files import append, write_atomically
from ..bench.trained import TrainedRun, config
from .contestants import PAPER, SIZES, Budget

Record = dict[str, Any]
"""What a run wrote about itself (run.json), with its contestant and seed."""


def read_records(path: Path) -> dict[tuple[str, int], Record]:
    """All finished runs by contestant and seed. A line that a kill tore is skipped."""
    found: dict[tuple[str, int], Record] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[record["contestant"], record["seed"]] = record
    return found


def sort_records(path: Path) -> None:
    """Writes the file anew, ordered by contestant and seed."""
    records = sorted(read_records(path).items())
    if records:
        write_atomically(path, "".join(f"{json.dumps(record)}\n" for _, record in records))


@dataclass(frozen=True)
class ContestantRun(TrainedRun):
    """The run of one seed. A run that has a record is not trained again.

    A run that diverges is a result too: it scores as guessing does.
    """

    contestant: str
    seed: int
    records: Path
    classes: int

    def train(self, threads: int) -> None:
        if recorded := self._recorded():
            self.refuse_another(recorded)
            return
        outcome: Record = {}
        try:
            super().train(threads)
        except DivergedError as error:
            guessing = dict.fromkeys(SIZES, 1 / self.classes)
            outcome = {"diverged": str(error), "scores": {"accuracy": guessing}}
        about = {"contestant": self.contestant, "seed": self.seed}
        append(self.records, json.dumps(about | super().told() | outcome).encode())

    def told(self) -> Record:
        return self._recorded() or super().told()

    def _recorded(self) -> Record | None:
        return read_records(self.records).get((self.contestant, self.seed))


def contestant_runs(
    name: str,
    runs: Path,
    out: Path,
    budget: Budget = PAPER,
    arguments: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
) -> list[ContestantRun]:
    """One run for each seed. Experiments of one budget share the runs of a contestant.

    Args:
        name: Of one of the budget's contestants.
        runs: Folder of all runs.
        out: Folder of the records, a file for each budget with a line for each finished run.
        budget: What the contestant is trained with.
        arguments: Further arguments of `softmaxfree fit`, the same for all contestants.
        seeds: The budget's if None.
    """
    folder = runs / budget.name / name.replace(", ", "-").replace(" ", "_")
    own = budget.contestants[name].arguments()
    chosen = config(budget.recipe), *budget.arguments, *own
    return [
        ContestantRun(
            Path(f"{folder}-{seed}"), (*chosen, f"--seed_everything={seed}", *arguments),
            name, seed, out / budget.records, budget.classes,
        )
        for seed in (budget.seeds if seeds is None else seeds)
    ]  # fmt: skip
