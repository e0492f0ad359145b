"""`softmaxfree bench training --preset steps`: whole training steps with every attention."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from tqdm import tqdm

from ...environment import command_line
from ...imports import import_modules
from ..measure import time_interleaved
from ..results import comparison, provenance, read, result, table, write
from .contestants import TITLES, layer_names

MODEL, BATCH, CLASSES = "softpp_nano", 64, 10


def run(
    threads: int | None, out: Path, modules: list[str] | None = None, against: Path | None = None
) -> dict[str, Any]:
    """Measures each attention in nano; writes JSON, CSV and Markdown; prints the table."""
    earlier = None if against is None else read(against)  # it may be written over
    import_modules(modules or [])
    if threads is not None:
        torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], object]] = {}
    for name in tqdm(layer_names(), desc="bench training, steps", unit="model", leave=False):
        torch.manual_seed(0)
        model = timm.create_model(MODEL, attention=name, num_classes=CLASSES).train()
        step = partial(_step, model, create_optimizer_v2(model, "adamw", lr=1e-3), images, labels)
        losses = [step() for _ in range(5)]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        row = {"attention": name, "parameters": parameters, "losses": losses}
        rows.append(row)
        if not losses[-1] < losses[0]:  # also if it is not finite
            row["note"] = f"does not learn: the loss goes from {losses[0]:.3g} to {losses[-1]:.3g}"
            continue
        calls[name] = step
    for name, timing in time_interleaved(calls, 5, 5).items():
        (row,) = [row for row in rows if row["attention"] == name]
        row["step_s"], row["step_median_s"] = timing.best, timing.median
    content = result(command_line(), rows, model=MODEL, batch=BATCH)
    stem = out / "training-steps"
    write(stem, content, markdown(content))
    print(report(content))
    if earlier is not None:
        print("\n" + comparison(content, earlier, ["attention"], ("step_s",)))
    print(f"\nwritten: {stem}.json, .csv and .md")
    return content


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def report(content: dict[str, Any], markdown: bool = False) -> str:
    own = next(row.get("step_s") for row in content["rows"] if row["attention"] == "softpp")
    lines = []
    for row in content["rows"]:
        line = [TITLES.get(row["attention"], row["attention"]), f"{row['parameters'] / 1e6:.2f}"]
        if "step_s" in row:
            line += [f"{row['step_s'] * 1e3:.0f}", f"{content['batch'] / row['step_s']:.0f}"]
            line += [f"{row['step_s'] / own:.2f}" if own else ""]
        else:
            line += [row["note"], "", ""]
        lines.append(line)
    return table(["attention", "M params", "ms a step", "img/s", "x ours"], lines, 1, markdown)


def markdown(content: dict[str, Any]) -> str:
    return f"""\
# Training steps: every attention in {content["model"]}, batch {content["batch"]} of 32 x 32

{provenance(content)}

{report(content, markdown=True)}

Forward, loss, backward and AdamW, best of interleaved repeats. Each has first lowered the loss of
its batch in five steps.
"""
