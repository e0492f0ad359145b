"""In which precision the operations compute, whatever precision the caller works in."""

import mindspore as ms
from mindspore import Tensor

EPS = 2.0**-23
"""Spacing of float32 at 1."""

TINY = 2.0**-63
"""A divisor's floor: neither it, nor its square, nor its inverse leaves float32's range."""

LARGEST = 2.0**63
"""Squares of what is below it are finite in float32."""


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return tensor if tensor.dtype == ms.float64 else tensor.astype(ms.float32)
