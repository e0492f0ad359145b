"""Logits of large images by overlapping windows."""

from collections.abc import Callable

from torch import Tensor

from ..errors import UserError


def sliding_logits(
    segment: Callable[[Tensor], Tensor], images: Tensor, window: int, step: int
) -> Tensor:
    """Logits (B, classes, H, W) of images (B, 3, H, W), averaged where windows overlap.

    Only one window and the sum are in memory. Windows at the edges are moved inwards, so that all
    have the same size. An image that one window covers is processed whole.

    Args:
        segment: Computes logits of images of any size.
        window: Side of the windows.
        step: Distance from one window to the next.
    """
    height, width = images.shape[-2:]
    rows, columns = places(height, window, step), places(width, window, step)
    if len(rows) == len(columns) == 1:
        return segment(images)
    total: Tensor | None = None
    count = images.new_zeros(1, 1, height, width)
    for top in rows:
        for left in columns:
            area = (..., slice(top, top + window), slice(left, left + window))
            logits = segment(images[area])
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], height, width)
            total[area] += logits
            count[area] += 1
    assert total is not None
    return total.div_(count)


def places(side: int, window: int, step: int) -> list[int]:
    """Start positions of windows: every `step`, with the last window at the end of the side."""
    if not 0 < step <= window:
        raise UserError(
            f"windows must follow each other without gaps: window {window}, step {step}; "
            "give a step from 1 to the window's side"
        )
    last = max(side - window, 0)
    return sorted({min(start, last) for start in range(0, last + step, step)})
