"""Results: one JSON schema for all, and the tables, CSV and Markdown that are made from it."""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError, user_file
from ..files import write_atomically

SCHEMA_VERSION = 1
Row = dict[str, Any]


def result(command: str, rows: list[Row], **more: Any) -> Row:
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


THREE = -1
"""The number of digits after the point with which three are significant."""


class Table(NamedTuple):
    """Cells of a table; the first `texts` columns are aligned to the left."""

    header: list[str]
    rows: list[list[str]]
    texts: int = 1


class Column(NamedTuple):
    """A column of a table: its heading, and a field of a row or a function of a row.

    Numbers have so many digits after the point, or three that are significant (`THREE`), in a unit;
    without digits they stand as they are. A row that lacks a field has an empty cell.
    """

    heading: str
    value: str | Callable[[Row], Any]
    digits: int | None = None
    unit: float = 1

    def cell(self, row: Row) -> str:
        try:
            value = row[self.value] if isinstance(self.value, str) else self.value(row)
        except KeyError:
            return ""
        if value is None or isinstance(value, str):
            return value or ""
        if self.digits is None:
            return f"{value:g}"
        value, digits = value / self.unit, self.digits
        if digits == THREE:
            digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
        return f"{value:.{digits}f}"


def columns(rows: Sequence[Row], *shown: Column) -> Table:
    """A line for each row; a column that has no value is left out.

    Leading columns without digits are texts. The `note` of a row stands in its first empty cell
    behind them.
    """
    lines = [[column.cell(row) for column in shown] for row in rows]
    kept = [i for i in range(len(shown)) if any(line[i] for line in lines)]
    texts = sum(1 for _ in takewhile(lambda i: shown[i].digits is None, kept))
    lines = [[line[i] for i in kept] for line in lines]
    for row, line in zip(rows, lines):
        if "note" in row and "" in line[texts:]:
            line[line.index("", texts)] = row["note"]
    return Table([shown[i].heading for i in kept], lines, texts)


class Note(str):
    """A paragraph of a page that is written, but not printed."""


class Page(NamedTuple):
    """A result for people: tables and paragraphs, printed and written as Markdown."""

    title: str
    parts: Sequence[str | Table]

    def printed(self) -> str:
        return _joined([part for part in self.parts if not isinstance(part, Note)], False)

    def markdown(self, origin: str) -> str:
        return _joined([f"# {self.title}", origin, *self.parts], True) + "\n"


def _joined(parts: Sequence[str | Table], markdown: bool) -> str:
    texts = [table(*x, markdown=markdown) if isinstance(x, Table) else x for x in parts]
    return "\n\n".join(filter(None, texts))


def publish(
    stem: Path,
    content: Row,
    page: Callable[[Row], Page],
    draw: Callable[[Row, Path], None] | None = None,
    earlier: Row | None = None,
    same: Sequence[str] = (),
) -> Row:
    """Prints a result and writes it as JSON, CSV, Markdown and, with `draw`, as a picture.

    `stem` is the files' path without a suffix. Rows of an earlier result that agree in the fields
    `same` are compared.
    """
    shown = page(content)
    write_atomically(stem.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    write_atomically(stem.with_suffix(".csv"), rows_as_csv(content["rows"]))
    write_atomically(stem.with_suffix(".md"), shown.markdown(provenance(content)))
    if draw is not None:
        draw(content, stem.with_suffix(".png"))
    print(shown.printed())
    if earlier is not None:
        print("\n" + comparison(content, earlier, same))
    print(f"\nwritten: {stem}.json, .csv" + (" and .md" if draw is None else ", .md and .png"))
    return content


def read(path: Path) -> Row:
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


def rows_as_csv(rows: list[Row]) -> str:
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


def comparison(content: Row, earlier: Row, same: Sequence[str]) -> str:
    """How best times and memory changed since an earlier run, in rows that agree in `same`.

    Ratios below 1 are faster or smaller. A row that only one of the runs has gets no ratio.
    """
    old, new = (
        {tuple(str(row.get(field)) for field in same): row for row in rows}
        for rows in (earlier["rows"], content["rows"])
    )
    changes = []
    for key in dict.fromkeys([*old, *new]):
        rows = old.get(key, {}), new.get(key, {})
        for name in dict.fromkeys(name for row in rows for name in row if _compared(row, name)):
            was, now = (row.get(name) for row in rows)
            change = {"quantity": name, "before": was, "now": now}
            change["ratio"] = now / was if was and now else None
            changes.append(dict(zip(same, key)) | change)
    numbers = [Column("before", "before", THREE), Column("now", "now", THREE)]
    texts = [Column(field, field) for field in [*same, "quantity"]]
    text = table(*columns(changes, *texts, *numbers, Column("ratio", "ratio", 2)))
    for what in ("hardware", "threads", "versions"):
        if earlier.get(what) != content[what]:
            text += f"\nNote: {what} differ from the earlier run's."
    return f"Against the run of commit {short_commit(earlier.get('commit'))}:\n{text}"


def _compared(row: Row, name: str) -> bool:
    measured = name.endswith(("_s", "_bytes")) and not name.endswith("_median_s")
    return measured and not isinstance(row[name], dict)


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


def provenance(content: Row) -> str:
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
