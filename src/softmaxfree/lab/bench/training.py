"""`softmaxfree bench training`: training steps; memory and time of ImageNet, by calculation."""

from functools import partial
from typing import Any, Literal

import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from tqdm import tqdm

from ...layers.mlp import Mlp
from ...layers.registry import ATTENTIONS
from ...models.cost import cost, image_bytes
from ..measure import noise
from ..results import Column, Note, Page, Row, columns
from .contestants import TITLES
from .runner import Benchmark, Call, Entry

NANO, NANO_BATCH, CLASSES = "softpp_nano", 64, 10
MODELS = ["softpp_tiny", "softpp_small", "softpp_medium", "softpp_large"]
SHAPE = (3, 224, 224)
IMAGES, EPOCHS, BATCH = 1_281_167, 300, 1024
"""Of the recipes: ImageNet-1K's training images, and images a step over all GPUs."""

GPUS = [8, 16, 32]
HOURS_GPUS = 8
"""GPUs that hours are given for."""

PARAMETER_BYTES = {
    "weights": 4,
    "gradients": 4,
    "AdamW's moments": 8,
    "moving average": 4,
    "DDP's buckets": 4,
}
"""Of one parameter, in float32, which mixed precision leaves as they are."""

SUSTAINED = {"V100": 9e12, "A100": 25e12}
"""Floating-point operations a second in mixed precision: assumed, not measured."""

PASSES = 3
"""Backward takes two products for each of forward."""

_EACH = sum(PARAMETER_BYTES.values())
_V100, _A100 = (f"{rate / 1e12:g}" for rate in SUSTAINED.values())
NOTES = f"""\
Nothing here was trained, and no GPU was measured.

memory: {_EACH} bytes a parameter, and for each image on the GPU what autograd keeps for the
  backward pass: counted exactly, on a CPU, as what a third image adds to two. CUDA itself, what an
  operation needs while it runs and half-precision copies of the weights are left out.
time: {PASSES} x 2 x multiply-adds x {IMAGES:,} images x {EPOCHS} epochs, without validation and
  without the inverses of the landmark matrices, 2 to 3 % more operations on a GPU.
  ASSUMED, not measured: a V100 sustains {_V100} TFLOP/s and an A100 {_A100} in mixed precision on
  models of this kind, about what Swin reaches (its authors' 12 minutes an epoch for Swin-B on 16
  V100, microsoft/Swin-Transformer issue 68, are 10); images are loaded as fast as they are used;
  twice the GPUs take half the time, on several nodes too."""


def bench_training(preset: Literal["steps", "imagenet"] = "steps", **options: Any) -> Row:
    """Measure training steps, or calculate what ImageNet training takes.

    Prints tables and writes them as JSON, CSV and Markdown.

    Args:
        preset: steps: whole steps, optimiser included, of softpp_nano with every attention
            (1 minute); imagenet: memory and time of the journal's models by calculation
            (2 minutes). Bytes kept for the backward pass are counted exactly, on a CPU; hours
            follow from multiply-adds and an assumed speed of the GPUs, which is printed with
            them. Nothing is trained.
        options: Those of `Benchmark`.
    """
    bench = Benchmark(**options)
    return measure_steps(bench) if preset == "steps" else calculate_imagenet(bench)


def measure_steps(bench: Benchmark) -> Row:
    """Measures a training step of nano with each attention, once it has been seen to learn."""
    entries = []
    for name in tqdm(ATTENTIONS, desc="bench training, steps", unit="model", leave=False):
        step = prepare_step(name, bench.device)
        losses = [step() for _ in range(5)]
        parameters = sum(parameter.numel() for parameter in step.args[0].parameters())
        row: Row = {"attention": name, "parameters": parameters, "losses": losses}
        learns = losses[-1] < losses[0]  # false also if it is not finite
        why = f"does not learn: the loss goes from {losses[0]:.3g} to {losses[-1]:.3g}"
        entries.append(Entry(row, partial(_given, step), obstacle="" if learns else why))
    rows = bench.measure(entries, "step", repeats=5, seconds=5.0)
    return bench.publish(
        "training-steps", rows, steps_page, same=["attention"], model=NANO, batch=NANO_BATCH
    )


def _given(call: Call) -> Call:
    return call


def prepare_step(attention: str, device: str = "cpu") -> partial[float]:
    """A step on one batch of noise, which returns its loss."""
    torch.manual_seed(0)
    images = noise(NANO_BATCH, 3, 32, 32).to(device)
    labels = torch.randint(CLASSES, (NANO_BATCH,)).to(device)
    model = timm.create_model(NANO, attention=attention, num_classes=CLASSES).to(device).train()
    return partial(_step, model, create_optimizer_v2(model, "adamw", lr=1e-3), images, labels)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def steps_page(content: Row) -> Page:
    own = next(row for row in content["rows"] if row["attention"] == "softpp")
    table = columns(
        content["rows"],
        Column("attention", lambda row: TITLES.get(row["attention"], row["attention"])),
        Column("M params", "parameters", 2, 1e6),
        Column("ms a step", "step_s", 0, 1e-3),
        Column("img/s", lambda row: content["batch"] / row["step_s"], 0),
        Column("x ours", lambda row: row["step_s"] / own["step_s"], 2),
    )
    note = """\
Forward, loss, backward and AdamW, best of interleaved repeats. Each has first lowered the loss of
its batch in five steps."""
    what = f"every attention in {content['model']}, batch {content['batch']} of 32 x 32"
    return Page(f"Training steps: {what}", [table, Note(note)])


def calculate_imagenet(bench: Benchmark) -> Row:
    """Calculates memory and time of all models."""
    rows = [_row(name) for name in tqdm(MODELS, desc="bench training", unit="model", leave=False)]
    return bench.publish(
        "training-imagenet",
        rows,
        imagenet_page,
        same=["model"],
        images=IMAGES,
        epochs=EPOCHS,
        batch=BATCH,
        bytes_per_parameter=PARAMETER_BYTES,
        assumed_flops_per_second=SUSTAINED,
    )


def _row(name: str) -> Row:
    torch.manual_seed(0)
    model = timm.create_model(name)
    for module in model.modules():
        if type(module) is Mlp:  # in tiles on a CPU only; the runs are on GPUs
            module.__class__ = timm.layers.Mlp
    found = cost(model, *SHAPE)
    flops = PASSES * 2 * (found.multiply_adds - found.inverse) * IMAGES * EPOCHS
    weights = _EACH * found.parameters
    image = {
        "float32": image_bytes(model, *SHAPE),
        "mixed": image_bytes(model, *SHAPE, autocast=torch.bfloat16),
    }
    return {
        "model": name,
        "parameters": found.parameters,
        "multiply_adds": found.multiply_adds,
        "inverse_multiply_adds": found.inverse,
        "weights_bytes": weights,
        "image_bytes": image,
        "gpu_bytes": {
            precision: {str(gpus): weights + kept * BATCH // gpus for gpus in GPUS}
            for precision, kept in image.items()
        },
        "flops": flops,
        "hours_gpus": HOURS_GPUS,
        "hours": {gpu: flops / (HOURS_GPUS * rate * 3600) for gpu, rate in SUSTAINED.items()},
    }


def imagenet_page(content: Row) -> Page:
    costs, memory = [], []
    for row in content["rows"]:
        images = {f"MB/image {name}": kept for name, kept in row["image_bytes"].items()}
        hours = {f"hours, {row['hours_gpus']} {gpu}": time for gpu, time in row["hours"].items()}
        costs.append(row | images | hours)
        for precision, taken in row["gpu_bytes"].items():
            gpus = {f"{gpu} x {content['batch'] // int(gpu)}": x for gpu, x in taken.items()}
            memory.append(row | {"precision": precision} | gpus)
    cost_table = columns(
        costs,
        Column("model", "model"),
        Column("params M", "parameters", 2, 1e6),
        Column("G mult-adds", lambda x: x["multiply_adds"] - x["inverse_multiply_adds"], 3, 1e9),
        *(Column(name, name, 1, 1e6) for name in images),
        *(Column(name, name, 0) for name in hours),
    )
    memory_table = columns(
        memory,
        Column("model", "model"),
        Column("precision", "precision"),
        Column("weights etc.", "weights_bytes", 2, 1e9),
        *(Column(name, name, 1, 1e9) for name in gpus),
    )
    by = f"GB on each GPU, by GPUs x images on each, {content['batch']} a step:"
    title = "ImageNet training: expected memory and time"
    return Page(title, [cost_table, by, memory_table, NOTES])
