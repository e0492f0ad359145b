"""`softmaxfree runs`: finished training runs side by side: settings, duration and scores."""

import json
from pathlib import Path
from typing import Any

import yaml

from ...environment import command_line
from ...errors import UserError, visible
from ..results import Table, number, result, short_commit, table, write
from .runner import Row

TITLE = "Runs, side by side"
SHOWN = ("mIoU", "pixel_accuracy", "AP50", "mask_AP50", "AP", "mask_AP", "accuracy", "loss")
"""Scores that the table shows; the JSON has all of them."""


def compare_runs(folders: list[Path], out: Path | None) -> Row:
    """Prints a table of finished runs; writes it as JSON, CSV and Markdown if `out` is given."""
    content = result(command_line(), [describe(folder) for folder in folders])
    lines = table_of(content["rows"])
    print(table(*lines))
    if out is not None:
        text = f"# {TITLE}\n\n{table(*lines, markdown=True)}\n\n{commands(content)}\n"
        write(out, content, text)
        print(f"\nwritten: {out}.json, .csv and .md")
    return content


def describe(folder: Path) -> Row:
    """A finished run as a row."""
    try:
        told = json.loads((folder / "run.json").read_text())
        config = yaml.safe_load((folder / "config.yaml").read_text())
        scores = told["scores"]
    except (FileNotFoundError, KeyError) as error:
        raise UserError(
            f"{folder} holds no finished run ({error}): give folders of runs that "
            "`softmaxfree fit` has finished"
        ) from None
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    return {
        "run": folder.name,
        "task": config["model"]["class_path"].rpartition(".")[2],
        "data": data.get("name") or data.get("root"),
        "backbone": model.get("backbone") or "",
        "attention": model.get("attention") or str(model.get("backbone")).partition("_")[0],
        "seed": config["seed_everything"],
        "epochs": config["trainer"]["max_epochs"],
        "minutes": told["seconds"] / 60,
        "scores": scores,
        **{name: told[name] for name in ("command", "threads", "commit", "hardware", "versions")},
    }


def table_of(rows: list[Row]) -> Table:
    scores = [name for name in SHOWN if any(name in row["scores"] for row in rows)]
    lines = [
        [
            row["run"],
            row["backbone"],
            row["attention"],
            str(row["seed"]),
            f"{row['minutes']:.1f}",
            *(_score(row["scores"].get(name)) for name in scores),
        ]
        for row in rows
    ]
    header = ["run", "backbone", "attention", "seed", "minutes", *scores]
    return Table(header, [list(map(visible, line)) for line in lines], 3)


def _score(value: Any) -> str:
    """A score; the first one, if it was measured at several image sizes."""
    return number(next(iter(value.values())) if isinstance(value, dict) else value, 3)


def commands(content: Row) -> str:
    """The command, hardware and commit of each run."""
    return "\n".join(
        f"- {row['run']}: `{row['command']}` on {row['hardware']['cpu']}, "
        f"threads: {row['threads']}, torch {row['versions']['torch']}, "
        f"commit {short_commit(row['commit'])}."
        for row in content["rows"]
    )
