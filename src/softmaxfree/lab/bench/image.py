"""The table of models that are measured on one large image."""

from collections.abc import Mapping

from torch import nn

from ..results import Table, number
from .runner import Row

SWIN = "Swin-T"
GROWING = {"ratios": [8, 4, 2, 1]}
"""Options with which the number of landmarks grows with the image, as in the released models."""


def image_table(rows: list[Row], group: str, names: Mapping[str, str]) -> Table:
    """A line for each row, with its time as a multiple of Swin-T's in the same group.

    Args:
        rows: As measured.
        group: Field of the rows, and heading of the first column.
        names: What the table calls the values of that field.
    """
    header = [group, "backbone", "M params", "G m-adds", "inverse", "s", f"/ {SWIN}", "MB"]
    swin = {row[group]: row.get("inference_s") for row in rows if row["title"] == SWIN}
    lines = []
    for row in rows:
        seconds, peer = row.get("inference_s"), swin.get(row[group])
        lines.append(
            [
                names[row[group]],
                row["title"],
                number(row["parameters"], 1, 1e6),
                number(row["multiply_adds"], 1, 1e9),
                number(row["inverse_multiply_adds"], 1, 1e9),
                f"{seconds:.2f}" if seconds else row["note"],
                f"{seconds / peer:.2f}" if seconds and peer else "",
                number(row["inference_bytes"], 0, 1e6),
            ]
        )
    return Table(header, lines, 2)


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
