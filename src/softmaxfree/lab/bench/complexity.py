"""Multiply-adds of one attention head, as counted, beside the formula in the paper."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...layers.attention import SoftmaxFreeAttention
from ...layers.multihead import Layout
from ..paper import LANDMARKS
from ..results import Column, Row, Table, columns

STEPS = 20
NOTES = """\
Multiply-adds of one head of width 32 beside the paper's (d + 4 m d + m^2) n + T m^3 + d m^2: that
counts P twice, and P A^+ before P^T V, which is not formed here; a Newton step is two products."""


def formula(n: int, m: int, d: int, steps: int) -> int:
    """The paper's time complexity, (d + 4 m d + m^2) n + T m^3 + d m^2, with constants of 1."""
    return (d + 4 * m * d + m**2) * n + steps * m**3 + d * m**2


def complexity() -> list[Row]:
    """Multiply-adds of one head at the sizes of tiny's first stages and the paper's values of m."""
    rows = []
    cases = [(56, m) for m in LANDMARKS] + [(28, 49), (14, 49), (112, 49)]
    for side, m in cases:
        row: Row = {"n": side**2, "m": m, "d": 32, "formula": formula(side**2, m, 32, 0)}
        row["formula_newton"] = formula(side**2, m, 32, STEPS)
        for key, inverse in (("auto", "auto"), ("newton", "paper")):
            layer = SoftmaxFreeAttention(32, 1, sampler="avg", num_landmarks=m, inverse=inverse)
            q = torch.zeros(1, 1, side**2, 32)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                layer.attend(q, q, q, Layout((side, side), (side, side), None, None))
            row[key] = counter.get_total_flops() / 2
        rows.append(row)
    return rows


def complexity_table(rows: list[Row]) -> Table:
    return columns(
        rows,
        Column("n", "n", 0),
        Column("m", "m", 0),
        Column("measured M", "auto", 2, 1e6),
        Column("formula, T = 0", "formula", 2, 1e6),
        Column("with 20 Newton steps", "newton", 2, 1e6),
        Column("formula, T = 20", "formula_newton", 2, 1e6),
    )
