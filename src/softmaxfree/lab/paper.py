"""What the paper prints, to stand beside what is measured."""

from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..layers.attention import SoftmaxFreeAttention
from ..layers.multihead import Layout
from .results import table

Row = dict[str, Any]
"""Memory of a batch in GB, millions of parameters, G multiply-adds, images a second, accuracy."""


def _row(memory: float, g: float, training: int, inference: int, top1: float) -> Row:
    return {
        "memory_gb": memory,
        "parameters_m": 13,
        "multiply_adds_g": g,
        "training": training,
        "inference": inference,
        "top1": top1,
    }


LINEARISATION: dict[str, Row] = {
    "softmax": _row(19.0, 3.9, 1073, 3240, 80.0),
    "linformer": _row(11.7, 1.9, 2767, 3779, 78.2),
    "performer": _row(15.0, 2.2, 2037, 3657, 76.1),
    "nystromformer": _row(17.2, 2.0, 1891, 3518, 80.1),
    "soft": _row(15.8, 1.9, 1730, 3436, 80.9),
    "softpp": _row(15.8, 1.9, 1730, 3436, 80.9),
}
"""Its table of linear transformers in tiny; a batch of 1024, of 256 for softmax."""

LENGTHS: dict[int, Row] = {
    36: {"memory_gb": 15.1, "multiply_adds_g": 1.9, "top1": 80.5},
    49: {"memory_gb": 15.8, "multiply_adds_g": 1.9, "top1": 80.9},
    64: {"memory_gb": 16.9, "multiply_adds_g": 2.0, "top1": 80.9},
    81: {"memory_gb": 18.5, "multiply_adds_g": 2.1, "top1": 80.4},
}
"""Its ablation of the number of landmarks."""

SAMPLERS: dict[str, Row] = {
    "conv": {"parameters_m": 13.07, "multiply_adds_g": 2.0, "top1": 80.9},
    "random": {"parameters_m": 12.96, "multiply_adds_g": 1.9, "top1": 80.8},
    "biased": {"parameters_m": 12.96, "multiply_adds_g": 1.9, "top1": 79.9},
    "avg": {"parameters_m": 12.96, "multiply_adds_g": 1.9, "top1": 80.8},
}
"""Its ablation of how they are made."""


class Printed(NamedTuple):
    """A row of its ImageNet table (tab:classification): a model trained and tested by somebody."""

    title: str
    family: str
    parameters_m: float
    multiply_adds_g: float | None
    top1: float
    model: str = ""
    """Its name in timm where it is measured here: the same model, at the side of its accuracy."""
    side: int = 224


IMAGENET = [
    Printed("ResNet-18", "ResNet", 11, 1.9, 69.8),
    Printed("PVT-Tiny", "PVT", 13, 1.9, 75.1),
    Printed("ConViT-Ti+", "ConViT", 10, 2.0, 76.7),
    Printed("CoaT-Lite Mini", "CoaT-Lite", 11, 2.0, 78.9),
    Printed("LambdaNets-50", "LambdaNets", 16, None, 78.9),
    Printed("ViP-Ti", "ViP", 13, 1.7, 79.0),
    Printed("SOFT-Tiny", "SOFT", 13, 1.9, 80.9, "soft_tiny_fudan"),
    Printed("SOFT++-Tiny", "SOFT++", 13, 1.9, 80.9, "softpp_tiny_fudan"),
    Printed("ResNet-50", "ResNet", 25, 4.1, 78.5, "resnet50"),
    Printed("PVT-Small", "PVT", 24, 4.0, 79.8),
    Printed("Swin-T", "Swin", 29, 4.5, 81.3, "swin_tiny_patch4_window7_224"),
    Printed("Twins-SVT-S", "Twins-SVT", 24, 3.7, 81.7),
    Printed("CoAtNet-0", "CoAtNet", 25, 4.2, 81.6),
    Printed("DeiT III-S", "DeiT III", 22, 4.6, 81.4, "deit3_small_patch16_224"),
    Printed("SwinV2-T", "SwinV2", 29, 4.5, 81.7, side=256),
    Printed("ConvNeXt-T", "ConvNeXt", 29, 4.5, 82.1, "convnext_tiny"),
    Printed("SOFT-Small", "SOFT", 27, 4.5, 82.5, "soft_small"),
    Printed("SOFT++-Small", "SOFT++", 27, 4.5, 82.6, "softpp_small"),
    Printed("ResNet-101", "ResNet", 44, 7.9, 79.8),
    Printed("PVT-Medium", "PVT", 44, 7.0, 81.2),
    Printed("ViT-Small/16", "ViT", 48, 9.9, 80.8),
    Printed("Swin-S", "Swin", 50, 8.7, 83.0),
    Printed("ConvNeXt-S", "ConvNeXt", 50, 8.7, 83.1),
    Printed("CoAtNet-1", "CoAtNet", 42, 8.4, 83.3),
    Printed("SwinV2-S", "SwinV2", 50, 8.7, 83.6, side=256),
    Printed("SOFT-Medium", "SOFT", 48, 8.7, 83.2, "soft_medium"),
    Printed("SOFT++-Medium", "SOFT++", 48, 8.7, 83.7, "softpp_medium"),
    Printed("CaiT-S36", "CaiT", 88, 13.9, 83.3),
    Printed("Swin-B", "Swin", 88, 15.4, 83.3),
    Printed("Twins-SVT-L", "Twins-SVT", 99, 14.8, 83.3),
    Printed("DeiT III-B", "DeiT III", 87, 15.5, 83.8),
    Printed("ConvNeXt-B", "ConvNeXt", 89, 15.4, 83.8),  # printed as ConvNext-S
    Printed("CoAtNet-2", "CoAtNet", 75, 15.7, 84.1),
    Printed("SwinV2-B", "SwinV2", 88, 15.4, 84.1, side=256),
    Printed("SOFT-Large", "SOFT", 85, 15.4, 83.6, "soft_large"),
    Printed("SOFT++-Large", "SOFT++", 85, 15.4, 84.1, "softpp_large"),
]
"""Its ImageNet table. Three of timm's models that are measured here are not those of their rows:
coatnet_0_rw_224 has 27 M parameters, vit_small_patch16_224 has 22 M, and SwinV2-T's accuracy is
that at 256 x 256."""

STEPS = 20


def formula(n: int, m: int, d: int, steps: int) -> int:
    """Its time complexity, (d + 4 m d + m^2) n + T m^3 + d m^2, with constants of 1."""
    return (d + 4 * m * d + m**2) * n + steps * m**3 + d * m**2


def complexity() -> list[dict[str, Any]]:
    """Multiply-adds of one head at the sizes of tiny's first three stages and of the paper's m."""
    rows = []
    cases = [(56, m) for m in LENGTHS] + [(28, 49), (14, 49), (112, 49)]
    for side, m in cases:
        row: dict[str, Any] = {"n": side**2, "m": m, "d": 32, "formula": formula(side**2, m, 32, 0)}
        row["formula_newton"] = formula(side**2, m, 32, STEPS)
        for key, inverse in (("auto", "auto"), ("newton", "paper")):
            layer = SoftmaxFreeAttention(32, 1, sampler="avg", num_landmarks=m, inverse=inverse)
            q = torch.zeros(1, 1, side**2, 32)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                layer.attend(q, q, q, Layout((side, side), (side, side), None, None))
            row[key] = counter.get_total_flops() / 2
        rows.append(row)
    return rows


def complexity_table(rows: list[dict[str, Any]], markdown: bool = False) -> str:
    header = ["n", "m", "measured M", "formula, T = 0", "with 20 Newton steps", "formula, T = 20"]
    lines = [
        [
            f"{row['n']:,}",
            str(row["m"]),
            *(f"{row[key] / 1e6:.2f}" for key in ("auto", "formula", "newton", "formula_newton")),
        ]
        for row in rows
    ]
    return table(header, lines, 0, markdown)


COMPLEXITY = """\
Multiply-adds of one head of width 32 beside the paper's (d + 4 m d + m^2) n + T m^3 + d m^2: that
counts P twice, and P A^+ before P^T V, which is not formed here; a Newton step is two products."""
