"""`softmaxfree bench memory`: the paper's figure of memory against the number of tokens."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ...environment import command_line
from ...imports import import_modules
from ..measure import exponents, in_fresh_process, memory_limit
from ..results import comparison, provenance, read, result, table, write
from .attention import memory_of_one_point
from .contestants import CPU, PACKAGES, VARIANTS, Case, Setting, find, layer_names, verify

CASES = [Case(1, 12, 784 * p, layers=12) for p in range(1, 9)]
"""12 layers, d = 384, 12 heads, m = 49, batch 1."""


def run(
    threads: int | None,
    out: Path,
    contestants: list[str] | None = None,
    modules: list[str] | None = None,
    setting: Setting = CPU,
    against: Path | None = None,
) -> dict[str, Any]:
    """Measures every attention; writes JSON, CSV, Markdown and the figure; prints the table."""
    from ..pictures import draw_memory  # needs matplotlib: said before, not after, the work

    earlier = None if against is None else read(against)  # it may be written over
    import_modules(modules or [])
    if threads is not None:
        torch.set_num_threads(threads)
    names = contestants or [*layer_names(), *VARIANTS, *PACKAGES]
    verify(names)
    rows = []
    work = [(name, case) for name in names for case in CASES]
    for name, case in tqdm(work, desc="bench memory", unit="point", leave=False):
        row: dict[str, Any] = {**asdict(case), "contestant": name}
        needs = find(name).needs(case, training=True)
        if needs > memory_limit():
            row["training_note"] = f"not run: needs {needs / 2**30:.1f} GiB"
        else:
            row["training_bytes"] = in_fresh_process(
                memory_of_one_point, case, name, "training", setting, modules or [],
                torch.get_num_threads(),
            )  # fmt: skip
            if row["training_bytes"] is None:
                row["training_note"] = "out of memory"
        rows.append(row)
    titles = {name: find(name).title for name in names}
    content = result(command_line(), rows, **asdict(setting), titles=titles)
    content["exponents"] = exponents(rows, "training_bytes")
    stem = out / "memory"
    write(stem, content, markdown(content))
    draw_memory(content, stem.with_suffix(".png"))
    print(report(content))
    if earlier is not None:
        print("\n" + comparison(content, earlier, ["contestant", "n"], ("training_bytes",)))
    print(f"\nwritten: {stem}.json, .csv, .md and .png")
    return content


def report(content: dict[str, Any], markdown: bool = False) -> str:
    """Megabytes by the number of tokens, the exponent, and why some are not there."""
    rows = content["rows"]
    sizes = list(dict.fromkeys(row["n"] for row in rows))
    values = {(row["contestant"], row["n"]): row for row in rows}
    lines = []
    for name, title in content["titles"].items():
        growth = content["exponents"].get(name)
        cells = [values[name, n].get("training_bytes") for n in sizes]
        lines.append(
            [
                title,
                *("-" if cell is None else f"{cell / 1e6:.0f}" for cell in cells),
                "" if growth is None else f"{growth:.2f}",
            ]
        )
    notes = [
        f"{content['titles'][row['contestant']]}, n = {row['n']}: {row['training_note']}"
        for row in rows
        if "training_note" in row
    ]
    text = table(["MB at n =", *map(str, sizes), "~ n^"], lines, 1, markdown)
    return "\n".join([text, *(["", *notes] if notes else [])])


def markdown(content: dict[str, Any]) -> str:
    return f"""\
# Memory: 12 attention layers in training, d = 384, 12 heads, m = 49, n = 784 p

{provenance(content)}

{report(content, markdown=True)}

The peak of a forward pass through 12 layers with residual connections, batch 1, and of the
backward pass through the last of them, when everything kept is still there; beyond the weights
and the input. {content["dtype"]} on {content["device"]}; each point in a fresh process, which may
take half of the machine's memory. Kernels and softmax matrices that a method forms count; fused
softmax forms none.
"""
