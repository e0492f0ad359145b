"""`softmaxfree reproduce`: its arguments."""

from pathlib import Path

from jsonargparse import ArgumentParser

from ...errors import UserError
from ..measure import check_machine
from .command import TITLES, run
from .page import write_page


def reproduce(arguments: list[str]) -> None:
    """Parses the command line of `softmaxfree reproduce`."""
    shown = "; ".join(f"{name}: {title.lower()}" for name, title in TITLES.items())
    parser = ArgumentParser(
        prog="softmaxfree reproduce",
        description="Test claims of the paper on CIFAR-10, in runs of 5 minutes on one core each. "
        "It resumes where it was stopped, shares runs between "
        "experiments, and writes tables, pictures and verdicts with the smallest difference that "
        f"the runs could have shown. Experiments: {shown}.",
    )
    parser.add_argument("names", nargs="*", help="Experiments.")
    parser.add_argument("--all", action="store_true", help="All experiments: 9 hours of one core.")
    parser.add_argument("--workers", type=int, default=1, help="Runs at a time.")
    parser.add_argument(
        "--threads", type=int, default=1, help="Threads to compute with, in each run."
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/reproduction"), help="Folder of the runs."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/reproduction"),
        help="Folder for the results.",
    )
    parser.add_argument("--page", type=Path | None, help="Markdown file for all results in --out.")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in TITLES]:
        raise UserError(f"there is no experiment {unknown[0]!r}; choose among {', '.join(TITLES)}")
    if (given.all and given.names) or not (given.all or given.names or given.page):
        raise UserError("name experiments, or give --all; --help lists them")
    check_machine(given.threads)
    if given.workers < 1:
        raise UserError(f"--workers must be at least 1, got {given.workers}")
    names = [*TITLES] if given.all else given.names
    run(names, given.workers, given.threads, given.runs, given.out)
    if given.page:
        write_page(given.out, given.page)
