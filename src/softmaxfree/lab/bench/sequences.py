"""`softmaxfree bench sequences`: a training step of the Long Range Arena's encoder by length."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ...layers.registry import ATTENTIONS
from ...models.sequence_classifier import WINDOW, SequenceClassifier
from ..results import Note, Page, Row
from .runner import Benchmark, Call, Entry, by_case, exponents, notes

LENGTHS = [1024 * 2**power for power in range(5)]
OURS = ("softpp", "soft")
FIXED = 128
"""Landmarks of SOFT and SOFT++ where their number does not grow with the sequence."""
REPEATS = 2
SECONDS = 30.0
"""A contestant that has taken longer at a length is not timed again there."""


def attentions() -> dict[str, tuple[str, dict[str, Any]]]:
    """Contestants: attentions and their options; SOFT and SOFT++ also with fixed landmarks."""
    peers = [name for name in ATTENTIONS if name not in OURS]
    fixed = {f"{name}_{FIXED}": (name, {"num_landmarks": FIXED}) for name in OURS}
    return {**{name: (name, {}) for name in OURS}, **fixed, **{name: (name, {}) for name in peers}}


def title(name: str) -> str:
    base, _, landmarks = name.partition("_")
    if base not in OURS:
        return name
    return f"{base}, {landmarks} landmarks" if landmarks else f"{base}, window {WINDOW}"


def training_step(attention: str, options: dict[str, Any], length: int, device: str) -> Call:
    """A step of one sequence: forward, backward and AdamW."""
    torch.manual_seed(0)
    model = SequenceClassifier(10, 512, length, attention, options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(1, 257, (1, length)).to(device)
    mask, target = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens[:, 0])

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens, mask), target).backward()
        optimizer.step()

    return step


def bench_sequences(**options: Any) -> Row:
    """Measure a training step on long sequences, 1,024 to 16,384 tokens (9 minutes).

    The encoder of the Long Range Arena with every attention, SOFT and SOFT++ with windows of 4
    tokens as in the paper and with 128 landmarks: time in turns, memory of a fresh process, and
    how both grow. Prints tables and writes them as JSON, CSV, Markdown and a picture.

    Args:
        options: Those of `Benchmark`.
    """
    from ..pictures import draw_over_n  # needs matplotlib: fails before the work, not after

    bench = Benchmark(**options)
    rows: list[Row] = []
    for n in tqdm(LENGTHS, desc="bench sequences", unit="length", leave=False):
        entries = [
            Entry(
                {"contestant": name, "n": n, "batch": 1, "heads": 2},
                partial(training_step, attention, chosen, n, bench.device),
            )
            for name, (attention, chosen) in attentions().items()
        ]
        rows += bench.measure(entries, "training", REPEATS, SECONDS, memory="call")
    titles = {name: title(name) for name in attentions()}
    growth = exponents(rows, "training_s", "training_bytes")
    same = ["contestant", "n"]
    return bench.publish(
        "sequences", rows, page, draw_over_n, same, titles=titles, exponents=growth
    )


def page(content: Row) -> Page:
    note = f"""\
2 layers, width 64, hidden width 128, 2 heads; one sequence with a mask, float32: forward, backward
and AdamW. Best of {REPEATS} interleaved repeats. Memory is what a step takes at its peak beyond
weights and libraries, in a fresh process that may take half of the machine's.

window {WINDOW} is the paper's setting for this benchmark: one landmark of every {WINDOW}
tokens, so that their number grows with n, products with n^2 and inverses with n^3.
With {FIXED} landmarks both are linear in n: `--model.options '{{"num_landmarks": {FIXED}}}'`.
Linformer has 256 mixtures, Nyströmformer 64 landmarks and a convolution of 35 values, Performer
256 features, Reformer 2 hashes, as in the benchmark, spatial reduction and Skyformer 128 tokens.
Reformer sorts into n / 64 buckets, which costs n^2."""
    return Page(
        "Long sequences: a training step of the Long Range Arena's encoder",
        [
            by_case(content, "ms at n =", "training_s", 1e-3),
            by_case(content, "MB at n =", "training_bytes", 1e6),
            notes(content),
            Note(note),
        ],
    )
