"""Results: one schema for all, written whole or not at all, and tables made from it."""

import json
from pathlib import Path
from typing import Any

import torch

from ..environment import commit, hardware, versions
from ..files import write_atomically

SCHEMA_VERSION = 1


def result(command: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Rows with what is needed to read them: command, commit, hardware, versions, threads."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        **more,
        "rows": rows,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")


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
    return (
        f"`{content['command']}` on {device}, {threads}, torch {versions['torch']}, "
        f"Python {versions['python']}, commit {(content['commit'] or 'none')[:9]}."
    )
