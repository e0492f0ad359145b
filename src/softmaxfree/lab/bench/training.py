"""`softmaxfree bench training`: training steps; memory and time of ImageNet, by calculation."""

from pathlib import Path
from typing import Literal

import timm
import torch
from tqdm import tqdm

from ...environment import command_line
from ...errors import UserError
from ...imports import Names
from ...layers.mlp import Mlp
from ...models.cost import cost, image_bytes
from ..results import Page, Table, number, publish, result
from .runner import Row, start
from .steps import measure_steps

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

memory: weights, gradients, AdamW's moments, the moving average and DDP's buckets, in all {_EACH}
  bytes a parameter, and for each image on the GPU what autograd keeps for the backward pass.
  That is counted exactly, on a CPU, as what a third image adds to two: in float32, and under
  autocast in bfloat16 for mixed precision. Left out: what an operation needs while it runs,
  half-precision copies of the weights (2 bytes a parameter), CUDA itself and what its allocator
  leaves unused. MB and GB are 1e6 and 1e9 bytes.
time: {PASSES} x 2 x multiply-adds x {IMAGES:,} images x {EPOCHS} epochs; training alone, without
  validation. The inverses of the landmark matrices are left out: on a GPU they are ten Newton
  steps, 2 to 3 % more operations, in float32 like all products with the kernel.
  ASSUMED, not measured: a V100 sustains {_V100} TFLOP/s and an A100 {_A100} in mixed precision on
  models of this kind, about what Swin reaches (its authors' 12 minutes an epoch for Swin-B on 16
  V100, microsoft/Swin-Transformer issue 68, are 10); images are loaded as fast as they are used;
  twice the GPUs take half the time, on several nodes too."""


def bench_training(
    preset: Literal["steps", "imagenet"] = "steps",
    threads: int = 1,
    out: Path = Path("results"),
    modules: Names = None,
    against: Path | None = None,
) -> Row:
    """Measure training steps, or calculate what ImageNet training takes.

    Prints tables and writes them as JSON, CSV and Markdown.

    Args:
        preset: steps: whole steps, optimiser included, of softpp_nano with every attention
            (1 minute); imagenet: memory and time of the journal's models by calculation
            (2 minutes). Bytes kept for the backward pass are counted exactly, on a CPU; hours
            follow from multiply-adds and an assumed speed of the GPUs, which is printed with
            them. Nothing is trained.
        threads: Threads to compute with; ratios are most reliable with 1.
        out: Folder for the results.
        modules: Python modules to import first, which register attentions of your own.
        against: A .json file of an earlier run to compare with; measured steps only.
    """
    if preset == "imagenet" and against is not None:
        raise UserError("--against compares measured steps; leave it out of a calculation")
    earlier = start(threads, modules=modules, against=against)
    return measure_steps(out, earlier) if preset == "steps" else calculate_imagenet(out)


def calculate_imagenet(out: Path) -> Row:
    """Calculates memory and time of all models."""
    rows = [_row(name) for name in tqdm(MODELS, desc="bench training", unit="model", leave=False)]
    content = result(
        command_line(),
        rows,
        images=IMAGES,
        epochs=EPOCHS,
        batch=BATCH,
        bytes_per_parameter=PARAMETER_BYTES,
        assumed_flops_per_second=SUSTAINED,
    )
    return publish(out / "training-imagenet", content, page)


def _row(name: str) -> Row:
    torch.manual_seed(0)
    model = timm.create_model(name)
    for module in model.modules():
        if type(module) is Mlp:  # in tiles on a CPU only; the runs are on GPUs
            module.__class__ = timm.layers.Mlp
    found = cost(model, *SHAPE)
    multiply_adds = found.multiply_adds - found.inverse
    flops = PASSES * 2 * multiply_adds * IMAGES * EPOCHS
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


def page(content: Row) -> Page:
    return Page(
        "ImageNet training: expected memory and time",
        [
            cost_table(content),
            f"GB on each GPU, by GPUs x images on each, {content['batch']} a step:",
            memory_table(content),
            NOTES,
        ],
    )


def cost_table(content: Row) -> Table:
    """Models: size, cost, memory of one image, hours."""
    header = ["model", "params M", "G mult-adds", "MB/image float32", "MB/image mixed"]
    gpus = content["rows"][0]["hours_gpus"]
    header += [f"hours, {gpus} {gpu}" for gpu in content["assumed_flops_per_second"]]
    lines = [
        [
            row["model"],
            number(row["parameters"], 2, 1e6),
            number(row["multiply_adds"] - row["inverse_multiply_adds"], 3, 1e9),
            *(number(kept, 1, 1e6) for kept in row["image_bytes"].values()),
            *(number(hours) for hours in row["hours"].values()),
        ]
        for row in content["rows"]
    ]
    return Table(header, lines)


def memory_table(content: Row) -> Table:
    """Memory of one GPU, by precision and number of GPUs."""
    counts = content["rows"][0]["gpu_bytes"]["mixed"]
    header = ["model", "precision", "weights etc."]
    header += [f"{gpus} x {content['batch'] // int(gpus)}" for gpus in counts]
    lines = [
        [
            row["model"],
            precision,
            number(row["weights_bytes"], 2, 1e9),
            *(number(taken, 1, 1e9) for taken in by_count.values()),
        ]
        for row in content["rows"]
        for precision, by_count in row["gpu_bytes"].items()
    ]
    return Table(header, lines, 2)
