"""What the paper prints, to stand beside what is measured."""

from typing import Any

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
"""Its ablation of the number of bottleneck tokens."""

SAMPLERS: dict[str, Row] = {
    "conv": {"parameters_m": 13.07, "multiply_adds_g": 2.0, "top1": 80.9},
    "random": {"parameters_m": 12.96, "multiply_adds_g": 1.9, "top1": 80.8},
    "biased": {"parameters_m": 12.96, "multiply_adds_g": 1.9, "top1": 79.9},
    "avg": {"parameters_m": 12.96, "multiply_adds_g": 1.9, "top1": 80.8},
}
"""Its ablation of how they are made."""

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
            layer = SoftmaxFreeAttention(32, 1, sampler="avg", tokens=m, inverse=inverse)
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
