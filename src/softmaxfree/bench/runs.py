"""Finished training runs side by side: what they were told, how long they took, their scores."""

import json
from pathlib import Path
from typing import Any

import yaml

from ..data.paths import read_file
from ..environment import command_line
from ..errors import UserError, visible
from .results import result, short_commit, table, write

TITLE = "Runs, side by side"
SHOWN = ("mIoU", "pixel_accuracy", "AP50", "mask_AP50", "AP", "mask_AP", "accuracy", "loss")
"""Scores in the table, where a run has them; all of them are in the JSON."""

_LONGEST = 2**24
"""Bytes of a file to read."""
_NOT_OF_A_RUN = (
    ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError,
)  # fmt: skip
"""What is raised for files that `fit` has not written."""


def run(folders: list[Path], out: Path | None) -> dict[str, Any]:
    """Reads the folders of runs and prints a table of them; writes it where asked."""
    content = result(command_line(), [describe(folder) for folder in folders])
    print(report(content["rows"]))
    if out is not None:
        text = f"# {TITLE}\n\n{report(content['rows'], markdown=True)}\n\n{commands(content)}\n"
        write(out, content, text)
        print(f"\nwritten: {out}.json, .csv and .md")
    return content


def describe(folder: Path) -> dict[str, Any]:
    """A finished run as a row."""
    try:
        told = json.loads(read_file(folder / "run.json", _LONGEST))
        config = yaml.safe_load(read_file(folder / "config.yaml", _LONGEST))
        return _row(folder.name, told, config)
    except _NOT_OF_A_RUN as error:
        reason = str(error)[:200] or type(error).__name__
        raise UserError(
            f"{folder} holds no finished run ({reason}): give folders that `softmaxfree fit` has "
            "written and come to the end of"
        ) from error


def _row(name: str, told: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    scores = dict(told["scores"])
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    return {
        "run": name,
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


def report(rows: list[dict[str, Any]], markdown: bool = False) -> str:
    scores = [name for name in SHOWN if any(name in row["scores"] for row in rows)]
    lines = [
        [
            row["run"],
            row["backbone"],
            row["attention"],
            str(row["seed"]),
            f"{row['minutes']:.1f}",
            *(_number(row["scores"].get(name)) for name in scores),
        ]
        for row in rows
    ]
    header = ["run", "backbone", "attention", "seed", "minutes", *scores]
    return table(header, [list(map(visible, line)) for line in lines], 3, markdown)


def _number(value: Any) -> str:
    """A score; of several image sizes, that of the first."""
    value = next(iter(value.values())) if isinstance(value, dict) else value
    return "" if value is None else f"{value:.3f}"


def commands(content: dict[str, Any]) -> str:
    """What each run was told, on what, and of which commit."""
    return "\n".join(
        f"- {row['run']}: `{row['command']}` on {row['hardware']['cpu']}, "
        f"threads: {row['threads']}, torch {row['versions']['torch']}, "
        f"commit {short_commit(row['commit'])}."
        for row in content["rows"]
    )
