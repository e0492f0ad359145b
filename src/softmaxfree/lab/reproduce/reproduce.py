"""`softmaxfree reproduce`: train what is missing, measure, and write what was found."""

import json
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from ...environment import command_line
from ...errors import UserError
from ...files import write_atomically
from ...imports import needs
from ..measure import check_machine
from ..results import result
from .contestants import PAPER
from .softx import EXPERIMENTS

with needs("train"):
    from ..bench.trained import TrainedRun, train_all
    from .measured import MEASURED, costs, softpp_runs
    from .records import contestant_runs
    from .tables import findings, titles, write_tables


def reproduce(arguments: list[str]) -> None:
    """The command, with the words of the command line after its name."""
    known = titles()
    shown = "; ".join(f"{name}: {title.lower()}" for name, title in known.items())
    parser = ArgumentParser(
        prog="softmaxfree reproduce",
        exit_on_error=False,
        allow_abbrev=False,
        description="Test claims of the paper on CIFAR-10, in runs of 5 minutes on one core each, "
        "and what softx does against its peers, in longer ones. "
        "The command resumes where it was stopped, and experiments share runs. It writes tables, "
        "pictures, and verdicts with the smallest difference that the runs could have shown. "
        f"Experiments: {shown}.",
    )
    add = parser.add_argument
    add("names", nargs="*", help="Names of experiments.")
    add(
        "--all", action="store_true", help="Run all experiments, for longer than a day on one core."
    )
    add(
        "--seeds",
        type=list[int] | None,
        help="Seeds of the runs, in place of all of an experiment's.",
    )
    add("--workers", type=int, default=1, help="Runs at a time.")
    add("--threads", type=int, default=1, help="Threads to compute with, in each run.")
    add("--runs", type=Path, default=Path("runs/reproduction"), help="Folder of the runs.")
    add("--out", type=Path, default=Path("results/reproduction"), help="Folder for the results.")
    add("--page", type=Path | None, help="File to write the page of all results to, as Markdown.")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in known]:
        raise UserError(f"there is no experiment {unknown[0]!r}; choose among {', '.join(known)}")
    if (given.all and given.names) or not (given.all or given.names or given.page):
        raise UserError("name experiments, or give --all; --help lists them")
    check_machine(given.threads)
    if given.workers < 1:
        raise UserError(f"--workers must be at least 1, got {given.workers}")
    names = [*known] if given.all else given.names
    run_experiments(names, given.workers, given.threads, given.runs, given.out, given.seeds)
    write_tables(given.out, given.page)


def run_experiments(
    names: Sequence[str],
    workers: int,
    threads: int,
    runs: Path,
    out: Path,
    seeds: Sequence[int] | None = None,
    arguments: Sequence[str] = (),
) -> None:
    """Runs experiments one after the other, and writes OUT/NAME.json and the records of runs."""
    for name in names:
        train_all(_runs(name, runs, out, seeds, arguments), workers, threads, name)
        if name in MEASURED:
            rows = MEASURED[name].measure(runs, seeds or PAPER.seeds)
        else:
            rows = costs(EXPERIMENTS[name].contestants, EXPERIMENTS[name].budget)
        content = result(command_line(), rows, experiment=name)
        write_atomically(out / f"{name}.json", json.dumps(content, indent=1) + "\n")
        print(f"{titles()[name]}\n\n{findings(name, out).report}\n\nwritten: {out / name}.json\n")


def _runs(
    name: str, runs: Path, out: Path, seeds: Sequence[int] | None, arguments: Sequence[str]
) -> Sequence[TrainedRun]:
    """The runs that an experiment needs."""
    if name in MEASURED:  # needs the weights, even where a record has the scores
        return softpp_runs(runs, seeds or PAPER.seeds, arguments)
    budget = EXPERIMENTS[name].budget
    of_contestants = [
        contestant_runs(contestant, runs, out, budget, arguments, seeds)
        for contestant in EXPERIMENTS[name].contestants
    ]
    # Seed by seed, so that a command that is stopped has compared something.
    return [run for of_seed in zip(*of_contestants) for run in of_seed]
