"""Whether this is a call for a result or one that records a graph for other sizes."""

from collections.abc import Callable

import torch

# torch 2.6 cannot tell an exported graph from a compiled one.
is_exporting: Callable[[], bool] = getattr(
    torch.compiler, "is_exporting", torch.compiler.is_compiling
)
