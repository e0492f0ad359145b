"""Results: one JSON schema for all, and the tables, CSV and Markdown that are made from it."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError, user_file
from ..files import write_atomically

SCHEMA_VERSION = 1


def result(command: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Rows with all that is needed to read them: command, commit, hardware, versions, threads, and
    whether the code of `softmaxfree build` was used."""
    import torch

    from ..environment import commit, hardware, versions
    from ..ops.backends import native

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


class Table(NamedTuple):
    """Cells of a table; the first `texts` columns are aligned to the left."""

    header: list[str]
    rows: list[list[str]]
    texts: int = 1


class Note(str):
    """A paragraph of a page that is written, but not printed."""


class Page(NamedTuple):
    """A result for people: tables and paragraphs, printed and written as Markdown."""

    title: str
    parts: Sequence[str | Table]

    def printed(self) -> str:
        return "\n\n".join(
            table(*part) if isinstance(part, Table) else part
            for part in self.parts
            if not isinstance(part, Note)
        )

    def markdown(self, origin: str) -> str:
        parts = [f"# {self.title}", origin, *self.parts]
        texts = [table(*x, markdown=True) if isinstance(x, Table) else x for x in parts]
        return "\n\n".join(texts) + "\n"


def publish(
    stem: Path,
    content: dict[str, Any],
    page: Callable[[dict[str, Any]], Page],
    draw: Callable[[dict[str, Any], Path], None] | None = None,
    earlier: dict[str, Any] | None = None,
    same: Sequence[str] = (),
) -> dict[str, Any]:
    """Prints a result and writes it as JSON, CSV, Markdown and, with `draw`, as a picture.

    Args:
        stem: The files' path without a suffix.
        content: What `result` returned.
        page: Makes tables and text of it.
        draw: Draws it to a file.
        earlier: A result to compare it with, row by row.
        same: Fields in which two rows agree that are compared.
    """
    shown = page(content)
    write(stem, content, shown.markdown(provenance(content)))
    if draw is not None:
        draw(content, stem.with_suffix(".png"))
    print(shown.printed())
    if earlier is not None:
        print("\n" + comparison(content, earlier, same))
    print(f"\nwritten: {stem}.json, .csv" + (" and .md" if draw is None else ", .md and .png"))
    return content


def write(stem: Path, content: dict[str, Any], markdown: str) -> None:
    """Writes the same result as JSON, as CSV (its rows alone) and as Markdown."""
    write_atomically(stem.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    write_atomically(stem.with_suffix(".csv"), rows_as_csv(content["rows"]))
    write_atomically(stem.with_suffix(".md"), markdown)


def read(path: Path) -> dict[str, Any]:
    """Reads an earlier result; raises UserError if the file is not one."""
    try:
        with user_file(path):
            content = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not JSON, as the results of a benchmark are") from error
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found != SCHEMA_VERSION or not isinstance(content.get("rows"), list):
        raise UserError(
            f"{path} is not a result of this command: expected schema_version {SCHEMA_VERSION} "
            f"and rows, got {found}; pass a .json file that `softmaxfree bench` has written"
        )
    return content


def rows_as_csv(rows: list[dict[str, Any]]) -> str:
    """A line for each row, and a column for each field that any of them has."""
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
    now: list[dict[str, Any]], before: list[dict[str, Any]], same: Sequence[str]
) -> list[dict[str, Any]]:
    """How best times and memory changed since an earlier run, in rows that agree in `same`.

    Each change is {same fields, quantity, before, now, ratio}. A row that only one of the runs has
    gets None for the other number and for the ratio.
    """

    def keyed(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[str, Any]]:
        return {tuple(str(row.get(field)) for field in same): row for row in rows}

    old, new = keyed(before), keyed(now)
    changes = []
    for key in dict.fromkeys([*old, *new]):
        rows = old.get(key, {}), new.get(key, {})
        for quantity in dict.fromkeys(name for row in rows for name in row if _compared(name)):
            was, is_now = (row.get(quantity) for row in rows)
            ratio = is_now / was if was and is_now else None
            change = {"quantity": quantity, "before": was, "now": is_now, "ratio": ratio}
            changes.append(dict(zip(same, key)) | change)
    return changes


def _compared(name: str) -> bool:
    return name.endswith(("_s", "_bytes")) and not name.endswith(("_median_s", "products_s"))


def comparison(content: dict[str, Any], earlier: dict[str, Any], same: Sequence[str]) -> str:
    """A table of what changed since an earlier run. Ratios below 1 are faster or smaller."""
    lines = [
        [
            *(change[field] for field in [*same, "quantity"]),
            *("-" if change[when] is None else f"{change[when]:.4g}" for when in ("before", "now")),
            number(change["ratio"], 2),
        ]
        for change in compare(content["rows"], earlier["rows"], same)
    ]
    text = table([*same, "quantity", "before", "now", "ratio"], lines, len(same) + 1)
    for what in ("hardware", "threads", "versions"):
        if earlier.get(what) != content[what]:
            text += f"\nNote: {what} differ from the earlier run's."
    return f"Against the run of commit {short_commit(earlier.get('commit'))}:\n{text}"


def number(value: float | None, digits: int = 0, unit: float = 1, missing: str = "") -> str:
    """A number in a unit, as a cell of a table."""
    return missing if value is None else f"{value / unit:.{digits}f}"


def table(header: list[str], rows: list[list[str]], texts: int = 1, markdown: bool = False) -> str:
    """Aligned columns for a terminal or as Markdown; the first `texts` of them to the left.

    By hand, as tabulate makes each column two wider than its heading: tables would not fit a line.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    rule = ["-" * width for width in widths]
    if markdown:
        rule = [f":{x[1:]}" if i < texts else f"{x[1:]}:" for i, x in enumerate(rule)]
    lines = [
        [x.ljust(w) if i < texts else x.rjust(w) for i, (x, w) in enumerate(zip(cells, widths))]
        for cells in (header, rule, *rows)
    ]
    if markdown:
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def provenance(content: dict[str, Any]) -> str:
    """One sentence on where the numbers come from."""
    hardware, versions = content["hardware"], content["versions"]
    device = hardware.get("gpu") or f"{hardware['cpu']} ({hardware['capability']})"
    threads = "1 thread" if content["threads"] == 1 else f"{content['threads']} threads"
    threads += ", with compiled code" if content.get("native") else ""
    return (
        f"`{content['command']}` on {device}, {threads}, torch {versions['torch']}, "
        f"Python {versions['python']}, commit {short_commit(content['commit'])}."
    )


def short_commit(commit: str | None) -> str:
    """For people; says whether the working copy had changes."""
    number, _, modified = (commit or "none").partition("-")
    return f"{number[:9]}, {modified}" if modified else number[:9]
