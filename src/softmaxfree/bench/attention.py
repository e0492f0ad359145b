"""`softmaxfree bench attention`: SOFT++ against softmax and against the released formula."""

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..environment import command_line
from ..files import write_atomically
from .contestants import CONTESTANTS, verify
from .measure import (
    exponent,
    in_fresh_process,
    peak_memory,
    square_product,
    time_interleaved,
)
from .results import provenance, result, table, write_json

MEMORY_LIMIT = 4 * 2**30
"""Bytes beyond which a contestant that forms all pairs of tokens is not run."""


@dataclass(frozen=True)
class Case:
    """One input: batch, heads, tokens; 49 landmarks of width 32, as in the paper."""

    batch: int
    heads: int
    n: int
    m: int = 49
    d: int = 32

    def tensors(self, gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.heads, self.n, self.d)
        q, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        places = torch.linspace(0, self.n - 1, self.m).long()
        landmarks = q[:, :, places].clone()
        for tensor in (q, v, landmarks):
            tensor.requires_grad_(gradients)
        return q, v, landmarks

    def products(self) -> int:
        """Operations of the three large products: the kernel, P^T V, and P times that."""
        return 3 * 2 * self.batch * self.heads * self.n * self.m * self.d


@dataclass(frozen=True)
class Preset:
    """What is measured: cases, contestants, and what the picture shows."""

    help: str
    cases: list[Case]
    contestants: list[str]
    repeats: int
    backward: bool = True


PRESETS = {
    "core": Preset(
        "SOFT++ against the released formula and softmax, where models use it",
        [Case(1, 2, 3136), Case(8, 2, 3136), Case(8, 10, 196), Case(1, 12, 6272)],
        ["softpp", "released", "released_lean", "sdpa"],
        repeats=15,
    ),
    "demo": Preset(
        "time and memory of softmax and SOFT++ from 28 x 28 to 224 x 224 tokens",
        [Case(1, 1, side * side) for side in (28, 56, 112, 224)],
        ["softpp", "sdpa", "softmax"],
        repeats=5,
        backward=False,
    ),
    "linear": Preset(
        "SOFT++ from 3,136 to a million tokens: how time and memory grow",
        [Case(1, 1, n) for n in (3136, 6272, 12544, 25088, 50176, 100352, 200704, 1_000_000)],
        ["softpp"],
        repeats=7,
    ),
}


def run(preset: str, threads: int | None, out: Path, memory: bool = True) -> dict[str, Any]:
    """Measures a preset; writes its JSON, Markdown and picture; prints the table."""
    from .pictures import draw_attention  # needs matplotlib: said before, not after, the work

    plan = PRESETS[preset]
    if threads is not None:
        torch.set_num_threads(threads)
    verify()
    work = tqdm(plan.cases, desc=f"bench attention, {preset}", unit="case", leave=False)
    rows = [row for case in work for row in _measure(case, plan, memory)]
    content = result(command_line(), rows, preset=preset)
    content["exponents"] = _exponents(plan, rows)
    stem = out / f"attention-{preset}"
    write_json(stem.with_suffix(".json"), content)
    write_atomically(stem.with_suffix(".md"), markdown(content))
    draw_attention(content, stem.with_suffix(".png"))
    print(report(content))
    print(f"\nwritten: {stem}.json, .md and .png")
    return content


def _measure(case: Case, plan: Preset, memory: bool) -> list[dict[str, Any]]:
    running = {}
    skipped = {}
    for name in plan.contestants:
        needs = CONTESTANTS[name].needs(case.batch * case.heads * case.n**2)
        if needs > MEMORY_LIMIT:
            skipped[name] = f"not run: needs {needs / 2**30:.1f} GiB"
        else:
            running[name] = CONTESTANTS[name].attention

    product, operations = square_product()
    with torch.no_grad():
        q, v, landmarks = case.tensors(gradients=False)
        forward = time_interleaved(
            {"product": product}
            | {name: partial(f, q, v, landmarks) for name, f in running.items()},
            plan.repeats,
        )
    both = {}
    if plan.backward:
        leaves = case.tensors(gradients=True)
        cotangent = torch.randn_like(leaves[1])

        def train(attention: Any) -> None:
            torch.autograd.grad(attention(*leaves), leaves, cotangent, allow_unused=True)

        both = time_interleaved(
            {name: partial(train, f) for name, f in running.items()}, plan.repeats
        )

    rate = operations / forward["product"].best
    rows = []
    for name in plan.contestants:
        row: dict[str, Any] = {**asdict(case), "contestant": name}
        if name in skipped:
            rows.append(row | {"note": skipped[name]})
            continue
        row["forward_s"] = forward[name].best
        row["forward_median_s"] = forward[name].median
        row["products_s"] = case.products() / rate
        if plan.backward:
            row["training_s"] = both[name].best
            row["training_median_s"] = both[name].median
        if memory:
            for gradients in (False, True) if plan.backward else (False,):
                key = "training_bytes" if gradients else "forward_bytes"
                row[key] = in_fresh_process(
                    __name__, case=asdict(case), contestant=name, gradients=gradients,
                    threads=torch.get_num_threads(),
                )  # fmt: skip
        rows.append(row)
    return rows


def _exponents(plan: Preset, rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How each quantity grows with n, where the cases differ in n alone."""
    if len({(case.batch, case.heads) for case in plan.cases}) > 1:
        return {}
    found: dict[str, dict[str, float]] = {}
    for name in plan.contestants:
        for key in ("forward_s", "training_s", "forward_bytes", "training_bytes"):
            # The exponent is that of 3,136 tokens and more: smaller inputs measure the start.
            points = [
                (row["n"], row[key])
                for row in rows
                if row["contestant"] == name and row.get(key) and 3136 <= row["n"] <= 200_704
            ]
            if len(points) > 1:
                sizes, values = zip(*points)
                found.setdefault(name, {})[key] = exponent(list(sizes), list(values))
    return found


def report(content: dict[str, Any], markdown: bool = False) -> str:
    """The table: times in ms, ratios to SOFT++, memory in MB."""
    rows = content["rows"]
    ours = {_case_key(row): row for row in rows if row["contestant"] == "softpp"}
    training = any("training_s" in row for row in rows)
    memory = any("forward_bytes" in row for row in rows)
    header = ["batch, heads, n", "attention", "ms", "x ours"]
    header += ["f+b ms", "x ours"] if training else []
    header += (["MB", "f+b MB"] if training else ["MB"]) if memory else []
    header += ["x products"]
    lines = []
    for row in rows:
        own = ours[_case_key(row)]
        line = [", ".join(f"{x:,}" for x in _case_key(row)), CONTESTANTS[row["contestant"]].title]
        if "note" in row:
            lines.append([*line, row["note"], *[""] * (len(header) - 3)])
            continue
        line += [f"{row['forward_s'] * 1e3:.1f}", f"{row['forward_s'] / own['forward_s']:.2f}"]
        if training:
            line += [f"{row['training_s'] * 1e3:.1f}"]
            line += [f"{row['training_s'] / own['training_s']:.2f}"]
        if memory:
            keys = ("forward_bytes", "training_bytes") if training else ("forward_bytes",)
            line += [_megabytes(row[key]) for key in keys]
        bare = f"{row['forward_s'] / row['products_s']:.2f}"
        if training:
            # The backward pass has six products to the forward pass's three.
            bare += f", {row['training_s'] / (3 * row['products_s']):.2f}"
        lines.append([*line, bare if row["contestant"] == "softpp" else ""])
    text = table(header, lines, 2, markdown)
    growth = [
        f"{CONTESTANTS[name].title}: "
        + ", ".join(f"{_QUANTITIES[key]} n^{p:.2f}" for key, p in quantities.items())
        for name, quantities in content["exponents"].items()
    ]
    return "\n".join([text, *(["", *growth] if growth else [])])


_QUANTITIES = {
    "forward_s": "time",
    "training_s": "f+b time",
    "forward_bytes": "memory",
    "training_bytes": "f+b memory",
}


def _case_key(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["batch"], row["heads"], row["n"]


def _megabytes(value: int | None) -> str:
    return "out of memory" if value is None else f"{value / 1e6:.1f}"


def markdown(content: dict[str, Any]) -> str:
    return f"""\
# Attention: {PRESETS[content["preset"]].help}

{provenance(content)}

{report(content, markdown=True)}

Best of interleaved repeats; only ratios within one run carry over to other machines. "x ours" is
a time divided by SOFT++'s. "x products" is SOFT++'s time divided by that of its large matrix
products alone (three forward, nine in all) at the rate of a 1024 x 1024 product in the same run.
Memory is the peak beyond the inputs, measured in a fresh process. m = 49 landmarks, d = 32,
float32.
"""


def _memory_of_one_point(arguments: dict[str, Any]) -> int:
    """In a process of its own: what one contestant takes for one case."""
    torch.set_num_threads(arguments["threads"])
    attention = CONTESTANTS[arguments["contestant"]].attention
    case, gradients = Case(**arguments["case"]), arguments["gradients"]

    def call(case: Case) -> Any:
        leaves = case.tensors(gradients)
        cotangent = torch.ones_like(leaves[1])

        def compute() -> Any:
            with torch.set_grad_enabled(gradients):
                out = attention(*leaves)
            if gradients:
                return torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
            return out

        return compute

    call(Case(1, 1, 64, case.m, case.d))()  # libraries are loaded, buffers of theirs made
    return peak_memory(call(case))


if __name__ == "__main__":
    print(json.dumps(_memory_of_one_point(json.loads(sys.argv[1]))))
