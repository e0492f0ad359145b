"""Panels of figures, and the files a figure is written to."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files import write_atomically
from ...imports import needs
from ..results import rows_as_csv

with needs("plots", "a figure"):
    from matplotlib import pyplot as plt
plt.switch_backend("agg")

__all__ = ["panels", "plt", "save"]


def panels(columns: int, rows: int = 1, width: float = 3.4, height: float = 3.0) -> tuple[Any, Any]:
    """A figure and its axes (rows, columns), each width x height inches."""
    size = (width * columns, height * rows)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def save(figure: Any, rows: Sequence[Mapping[str, Any]], stem: Path) -> None:
    """Writes STEM.png, STEM.svg and the numbers as STEM.csv, each atomically."""
    for suffix in ("png", "svg"):
        buffer = io.BytesIO()
        # The same numbers give the same file.
        metadata = {"Date": None} if suffix == "svg" else None
        with plt.rc_context({"svg.hashsalt": "softmaxfree"}):
            figure.savefig(buffer, format=suffix, dpi=160, metadata=metadata)
        figure.set_layout_engine("none")  # it is laid out once for both
        write_atomically(stem.with_suffix(f".{suffix}"), buffer.getvalue())
    plt.close(figure)
    write_atomically(stem.with_suffix(".csv"), rows_as_csv([dict(row) for row in rows]))
    print(f"written: {stem}.png, .svg, .csv")
