"""`softmaxfree runs`: training runs side by side."""

import json
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from tabulate import tabulate

from ..allow_list import is_word
from ..data.paths import read_file
from ..errors import UserError, visible
from ..files import write_atomically
from ..trust import read_yaml
from .folder import is_running
from .report import LONGEST_RECORD, origin

SHOWN = ("mIoU", "pixel_accuracy", "AP50", "mask_AP50", "AP", "mask_AP", "accuracy", "loss")
"""Scores in the table, where a run has them; all of them are in the JSON."""


def runs(arguments: list[str]) -> None:
    """Parses the command line of `softmaxfree runs`."""
    parser = ArgumentParser(
        prog="softmaxfree runs",
        exit_on_error=False,
        allow_abbrev=False,
        description="Put training runs side by side: time, seed and scores of each.",
    )
    parser.add_argument("folders", nargs="+", type=Path, help="Folders of runs, or of a run.")
    parser.add_argument(
        "--out",
        type=Path | None,
        help="Folder for TASK-runs.json and TASK-runs.md; printed only if not given.",
    )
    given = parser.parse_args(arguments)
    compare_runs(given.folders, given.out)


def compare_runs(folders: list[Path], out: Path | None = None) -> None:
    """Prints a table of runs and, with `out`, writes it as JSON and Markdown.

    Args:
        folders: Runs, or folders of runs; others are left out with a note.
        out: Folder for the files.

    Raises:
        UserError: If there is no run in any folder.
    """
    rows, errors = [], []
    for folder in folders:
        inside = [] if (folder / "run.json").exists() else sorted(folder.glob("*/run.json"))
        for run in [path.parent for path in inside] or [folder]:
            try:
                rows.append(describe(run))
            except UserError as error:
                errors.append(error)
    if not rows:
        raise errors[0]
    for reason in errors:
        print(f"left out: {visible(reason)}", file=sys.stderr)
    print(report(rows, "simple"))
    if out is not None:
        tasks = {row["task"].lower() for row in rows}
        path = out / f"{'-'.join(sorted(tasks))}-runs.json"
        content = {"schema_version": 1, **origin(), "rows": rows}
        text = f"# Runs, side by side\n\n{report(rows, 'pipe')}\n\n{commands(rows)}\n"
        write_atomically(path, json.dumps(content, indent=1) + "\n")
        write_atomically(path.with_suffix(".md"), text)
        print(f"\nwritten: {path} and .md")


def describe(folder: Path) -> dict[str, Any]:
    """A run as a row of the table; one that is not finished has no scores."""
    try:
        told = json.loads(read_file(folder / "run.json", LONGEST_RECORD))
        path = folder / "config.yaml"
        row = _row(folder, told, read_yaml(read_file(path, LONGEST_RECORD).decode(), path))
        json.dumps(row)  # what cannot be written down is no run
        report([row], "simple")
        commands([row])
    except Exception as error:  # whatever files lead to that `fit` has not written
        reason = visible(error)[:200] or type(error).__name__
        raise UserError(
            f"{folder} holds no run ({reason}): give folders that `softmaxfree fit` has written"
        ) from error
    return row


def _row(folder: Path, told: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    state = "finished" if "scores" in told else "running" if is_running(folder) else "unfinished"
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    task = config["model"]["class_path"].rpartition(".")[2]
    if not task or not is_word(task):  # a part of the name of a file
        raise ValueError(f"{task} is no task")
    return {
        "run": folder.name,
        "state": state,
        "task": task,
        "data": data.get("name") or data.get("root"),
        "backbone": model.get("backbone") or "",
        "from": told.get("start", ""),
        "attention": model.get("attention") or str(model.get("backbone")).partition("_")[0],
        "seed": config["seed_everything"],
        "epochs": config["trainer"]["max_epochs"],
        "minutes": told["seconds"] / 60,
        "scores": dict(told.get("scores", {})),
        "threads": told.get("threads"),
        **{name: told[name] for name in ("command", "commit", "hardware", "versions")},
    }


def report(rows: list[dict[str, Any]], style: str) -> str:
    """The table of runs in one of tabulate's styles."""
    scores = [name for name in SHOWN if any(name in row["scores"] for row in rows)]
    unfinished = any(row["state"] != "finished" for row in rows)
    lines = [
        [
            *(visible(row[name]) for name in ("run", "backbone", "attention", "from", "seed")),
            f"{row['minutes']:.1f}",
            *(_number(row["scores"].get(name)) for name in scores),
            *([row["state"]] if unfinished else []),
        ]
        for row in rows
    ]
    header = ["run", "backbone", "attention", "from", "seed", "minutes", *scores]
    header += ["state"] if unfinished else []
    alignment = ["left"] * 4 + ["right"] * (2 + len(scores)) + ["left"] * unfinished
    return tabulate(lines, header, style, colalign=alignment, disable_numparse=True)


def _number(value: Any) -> str:
    """A score; if there are scores at several image sizes, the one at the first."""
    value = next(iter(value.values()), None) if isinstance(value, dict) else value
    return "" if value is None else f"{value:.3f}"


def commands(rows: list[dict[str, Any]]) -> str:
    """The command, hardware and commit of each run, as a list in Markdown."""
    return "\n".join(
        visible(
            f"- {row['run']}: `{row['command']}` on {row['hardware']['cpu']}, "
            f"threads: {row['threads']}, torch {row['versions']['torch']}, "
            f"commit {(row['commit'] or 'none')[:9]}."
        )
        for row in rows
    )
