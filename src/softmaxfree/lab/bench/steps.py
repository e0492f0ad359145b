"""Whole training steps with every attention, for `softmaxfree bench training --preset steps`."""

from functools import partial
from pathlib import Path

import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from tqdm import tqdm

from ...environment import command_line
from ..results import Note, Page, Table, number, publish, result
from .contestants import TITLES, layer_names
from .image import parameters_of
from .runner import Call, Entry, Plan, Row, measure_in_turns

MODEL, BATCH, CLASSES = "softpp_nano", 64, 10


def measure_steps(out: Path, earlier: Row | None = None) -> Row:
    """Measures a training step of nano with each attention, once it has been seen to learn."""
    entries = []
    for name in tqdm(layer_names(), desc="bench training, steps", unit="model", leave=False):
        step, parameters = prepare_step(name)
        losses = [step() for _ in range(5)]
        row: Row = {"attention": name, "parameters": parameters, "losses": losses}
        learns = losses[-1] < losses[0]  # false also if it is not finite
        why = f"does not learn: the loss goes from {losses[0]:.3g} to {losses[-1]:.3g}"
        entries.append(Entry(row, partial(_given, step), obstacle="" if learns else why))
    measure_in_turns(entries, "step", Plan(5, 5.0))
    rows = [entry.row for entry in entries]
    content = result(command_line(), rows, model=MODEL, batch=BATCH)
    return publish(out / "training-steps", content, page, earlier=earlier, same=["attention"])


def _given(call: Call) -> Call:
    return call


def prepare_step(attention: str) -> tuple[partial[float], int]:
    """A step on one batch of noise, and the model's parameters."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    torch.manual_seed(0)
    model = timm.create_model(MODEL, attention=attention, num_classes=CLASSES).train()
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3)
    return partial(_step, model, optimizer, images, labels), parameters_of(model)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def page(content: Row) -> Page:
    own = next(row.get("step_s") for row in content["rows"] if row["attention"] == "softpp")
    lines = []
    for row in content["rows"]:
        line = [TITLES.get(row["attention"], row["attention"]), number(row["parameters"], 2, 1e6)]
        if seconds := row.get("step_s"):
            line += [number(seconds, 0, 1e-3), f"{content['batch'] / seconds:.0f}"]
            line += [f"{seconds / own:.2f}" if own else ""]
        else:
            line += [row["note"], "", ""]
        lines.append(line)
    note = """\
Forward, loss, backward and AdamW, best of interleaved repeats. Each has first lowered the loss of
its batch in five steps."""
    return Page(
        f"Training steps: every attention in {content['model']}, "
        f"batch {content['batch']} of 32 x 32",
        [Table(["attention", "M params", "ms a step", "img/s", "x ours"], lines), Note(note)],
    )
