"""Results: one schema for all, written whole or not at all, and tables made from it."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import torch

from ..environment import commit, hardware, versions
from ..errors import UserError, user_file
from ..files import write_atomically
from ..ops.backends import native

SCHEMA_VERSION = 1


def result(command: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Rows with what is needed to read them: command, commit, hardware, versions, threads, and
    whether the code of `softmaxfree build` was there."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "native": native.library() is not None,
        **more,
        "rows": rows,
    }


def write(stem: Path, content: dict[str, Any], markdown: str) -> None:
    """The same result as JSON, as CSV (its rows alone) and as Markdown."""
    write_atomically(stem.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    write_atomically(stem.with_suffix(".csv"), rows_as_csv(content["rows"]))
    write_atomically(stem.with_suffix(".md"), markdown)


def read(path: Path) -> dict[str, Any]:
    """An earlier result; refuses what is none."""
    try:
        with user_file(path):
            content = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a result in JSON: {error}") from None
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found != SCHEMA_VERSION or not isinstance(content.get("rows"), list):
        raise UserError(
            f"{path} is not a result of this command: expected schema_version {SCHEMA_VERSION} "
            f"and rows, got {found}; pass a .json file that `softmaxfree bench` has written"
        )
    return content


def rows_as_csv(rows: list[dict[str, Any]]) -> str:
    """A line for each row; a column for each quantity that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()}
        )
    return text.getvalue()


def compare(
    now: list[dict[str, Any]], before: list[dict[str, Any]], same: list[str]
) -> list[dict[str, Any]]:
    """How quantities changed since an earlier run: those of rows that agree in the fields `same`.

    Each gives {same fields, quantity, before, now, ratio}; seconds and bytes are compared. Rows
    that only one of the runs has are said so, with None for the other's number.
    """

    def keyed(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[str, Any]]:
        return {tuple(str(row.get(field)) for field in same): row for row in rows}

    old, new = keyed(before), keyed(now)
    changes = []
    for key in dict.fromkeys([*old, *new]):
        rows = old.get(key, {}), new.get(key, {})
        quantities = dict.fromkeys(
            name for row in rows for name in row if name.endswith(("_s", "_bytes"))
        )
        for quantity in quantities:
            was, is_now = (row.get(quantity) for row in rows)
            changes.append(
                dict(zip(same, key))
                | {
                    "quantity": quantity,
                    "before": was,
                    "now": is_now,
                    "ratio": is_now / was if was and is_now else None,
                }
            )
    return changes


def comparison(
    content: dict[str, Any], earlier: dict[str, Any], same: list[str], quantities: tuple[str, ...]
) -> str:
    """A table of what changed since an earlier run. Ratios below 1 are faster or smaller."""
    lines = [
        [
            *(change[field] for field in same),
            change["quantity"],
            *(_significant(change[when]) for when in ("before", "now")),
            "" if change["ratio"] is None else f"{change['ratio']:.2f}",
        ]
        for change in compare(content["rows"], earlier["rows"], same)
        if change["quantity"] in quantities
    ]
    text = table([*same, "quantity", "before", "now", "ratio"], lines, len(same) + 1)
    warning = ""
    for what in ("hardware", "threads", "versions"):
        if earlier.get(what) != content[what]:
            warning += f"\nNote: {what} differ from the earlier run's."
    commit = short_commit(earlier.get("commit"))
    return f"Against the run of commit {commit}:\n{text}{warning}"


def _significant(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def table(header: list[str], rows: list[list[str]], texts: int = 1, markdown: bool = False) -> str:
    """Columns aligned for a terminal, or as Markdown: first texts, to the left, then numbers."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths))
        ]
        return "| " + " | ".join(padded) + " |" if markdown else "  ".join(padded).rstrip()

    if markdown:
        rule = [
            ":" + "-" * (w - 1) if i < texts else "-" * (w - 1) + ":" for i, w in enumerate(widths)
        ]
    else:
        rule = ["-" * width for width in widths]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


def provenance(content: dict[str, Any]) -> str:
    """One sentence on where the numbers come from."""
    hardware, versions = content["hardware"], content["versions"]
    device = hardware.get("gpu") or f"{hardware['cpu']} ({hardware['capability']})"
    threads = "1 thread" if content["threads"] == 1 else f"{content['threads']} threads"
    threads += ", with compiled code" if content["native"] else ""
    return (
        f"`{content['command']}` on {device}, {threads}, torch {versions['torch']}, "
        f"Python {versions['python']}, commit {short_commit(content['commit'])}."
    )


def short_commit(commit: str | None) -> str:
    """For people; says whether the working copy was another."""
    number, _, modified = (commit or "none").partition("-")
    return f"{number[:9]}, {modified}" if modified else number[:9]
