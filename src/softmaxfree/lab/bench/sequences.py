"""`softmaxfree bench sequences`: a training step of the Long Range Arena's encoder by length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ...environment import command_line
from ...imports import import_modules
from ...models.sequence_classifier import WINDOW, SequenceClassifier
from ..measure import exponents, in_fresh_process, peak_memory, time_interleaved
from ..results import provenance, result, table, write
from .contestants import layer_names

LENGTHS = [1024 * 2**power for power in range(5)]
OURS = ("softpp", "soft")
TOKENS = 128
REPEATS = 2
SECONDS = 30.0
"""A contestant that has taken longer at a length is not timed again there."""

Contestant = tuple[str, dict[str, Any]]
"""An attention and its options."""


def contestants() -> dict[str, Contestant]:
    """Every attention by its name; SOFT and SOFT++ also with a fixed number of landmarks."""
    peers = [name for name in layer_names() if name not in OURS]
    fixed = {f"{name}_{TOKENS}": (name, {"num_landmarks": TOKENS}) for name in OURS}
    return {**{name: (name, {}) for name in OURS}, **fixed, **{name: (name, {}) for name in peers}}


def title(name: str) -> str:
    base, _, tokens = name.partition("_")
    if base not in OURS:
        return name
    return f"{base}, {tokens} tokens" if tokens else f"{base}, window {WINDOW}"


def training_step(contestant: Contestant, length: int) -> Callable[[], None]:
    """A step of one sequence: forward, backward and AdamW."""
    torch.manual_seed(0)
    attention, options = contestant
    model = SequenceClassifier(10, 512, length, attention, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(1, 257, (1, length))
    mask, target = torch.ones_like(tokens, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens, mask), target).backward()
        optimizer.step()

    return step


def memory_of_step(contestant: Contestant, length: int, threads: int, modules: list[str]) -> int:
    """In a process of its own: bytes that a step takes, beyond weights and libraries."""
    torch.set_num_threads(threads)
    import_modules(modules)
    return peak_memory(training_step(contestant, length))


def run(threads: int, out: Path, modules: list[str]) -> dict[str, Any]:
    """Measures every attention at every length; writes JSON, CSV, Markdown and a picture."""
    from ..pictures import draw_attention  # needs matplotlib: said before, not after, the work

    import_modules(modules)
    torch.set_num_threads(threads)
    entries = contestants()
    measured: dict[tuple[str, int], dict[str, Any]] = {}
    progress = tqdm(total=len(LENGTHS) * len(entries), desc="bench sequences", leave=False)
    for n in LENGTHS:
        steps = {}
        for name, entry in entries.items():
            row: dict[str, Any] = {"contestant": name, "n": n, "batch": 1, "heads": 2}
            row["training_bytes"] = in_fresh_process(memory_of_step, entry, n, threads, modules)
            if row["training_bytes"] is None:
                row["note"] = "out of memory"
            else:
                steps[name] = training_step(entry, n)
            measured[name, n] = row
            progress.update()
        for name, timing in time_interleaved(steps, REPEATS, SECONDS).items():
            row = measured[name, n]
            row["training_s"], row["training_median_s"] = timing.best, timing.median
    progress.close()
    rows = list(measured.values())
    growth: dict[str, dict[str, float]] = {}
    for quantity in ("training_s", "training_bytes"):
        for name, exponent in exponents(rows, quantity).items():
            growth.setdefault(name, {})[quantity] = exponent
    titles = {name: title(name) for name in entries}
    content = result(command_line(), rows, titles=titles, exponents=growth)
    stem = out / "sequences"
    write(stem, content, markdown(content))
    draw_attention(content, stem.with_suffix(".png"))
    print(report(content))
    print(f"\nwritten: {stem}.json, .csv, .md and .png")
    return content


def report(content: dict[str, Any], markdown: bool = False) -> str:
    """Milliseconds and megabytes of a step by length, with their exponents."""
    parts = []
    for heading, quantity, unit in (
        ("ms at n =", "training_s", 1e-3),
        ("MB at n =", "training_bytes", 1e6),
    ):
        values = {(row["contestant"], row["n"]): row.get(quantity) for row in content["rows"]}
        sizes = list(dict.fromkeys(n for _, n in values))
        lines = []
        for name, shown in content["titles"].items():
            cells = [values[name, n] for n in sizes]
            growth = content["exponents"].get(name, {}).get(quantity)
            lines.append(
                [
                    shown,
                    *("-" if cell is None else f"{cell / unit:.0f}" for cell in cells),
                    "" if growth is None else f"{growth:.2f}",
                ]
            )
        parts.append(table([heading, *map(str, sizes), "~ n^"], lines, 1, markdown))
    notes = [
        f"{content['titles'][row['contestant']]}, n = {row['n']}: {row['note']}"
        for row in content["rows"]
        if "note" in row
    ]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def markdown(content: dict[str, Any]) -> str:
    return f"""\
# Long sequences: a training step of the Long Range Arena's encoder

{provenance(content)}

{report(content, markdown=True)}

2 layers, width 64, hidden width 128, 2 heads; one sequence with a mask, float32: forward, backward
and AdamW. Best of {REPEATS} interleaved repeats. Memory is what a step takes at its peak beyond
weights and libraries, in a fresh process that may take half of the machine's.

window {WINDOW} is the paper's setting for this benchmark: one landmark of every {WINDOW}
tokens, so that their number grows with n, products with n^2 and inverses with n^3.
With {TOKENS} tokens both are linear in n: `--model.options '{{"num_landmarks": {TOKENS}}}'`.
Linformer has 256 mixtures, Nyströmformer 64 landmarks and a convolution of 35 values, Performer
256 features, Reformer 2 hashes, as in the benchmark, spatial reduction and Skyformer 128 tokens.
Reformer sorts into n / 64 buckets, which costs n^2.
"""
