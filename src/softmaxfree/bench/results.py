"""Results: one schema for all, written whole or not at all, and tables made from it."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

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


def commit() -> str | None:
    """The commit of the working copy that this package runs from; None if it is installed."""

    def git(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return git("rev-parse", "HEAD") + ("-modified" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system()}
    found["capability"] = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("softmaxfree", "timm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


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


def command_line() -> str:
    """The command that runs now, as a user would type it."""
    return " ".join(["softmaxfree", *sys.argv[1:]])
