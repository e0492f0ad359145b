"""Code that has to hold in recorded graphs, for other sizes than the recorded one."""

from collections.abc import Callable
from typing import Any

import torch

# torch 2.6 cannot tell an exported graph from a compiled one.
is_exporting: Callable[[], bool] = getattr(
    torch.compiler, "is_exporting", torch.compiler.is_compiling
)


def ceil_div(count: Any, divisor: Any) -> Any:
    """count / divisor rounded up, of whole numbers or tensors of them, none of them negative.

    Not as -(-count // divisor): ONNX's integer division rounds towards zero.
    """
    return (count + divisor - 1) // divisor
