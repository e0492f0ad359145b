"""How the operations are computed: by torch, or by something faster where that is available.

`Torch` computes everything everywhere. A faster backend is one file with a subclass that
overrides some methods, and one entry in `FASTER`; `choose` is the only place that decides
between them. Gradients are not a backend's business: they are derived once, beside each
operation, from the methods here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch.compiler import is_compiling  # the name `torch` is the submodule's here

from .native import Native
from .torch import Torch

TORCH = Torch()
FASTER: tuple[Torch, ...] = (Native(),)
"""In order of preference."""

_torch_only = ContextVar("_torch_only", default=False)


def choose(*tensors: Tensor | None) -> Torch:
    """The first backend that takes all these tensors; torch in graphs that are compiled."""
    if not is_compiling() and not _torch_only.get():
        given = [x for x in tensors if x is not None]
        for backend in FASTER:
            if backend.takes(*given):
                return backend
    return TORCH


@contextmanager
def torch_only() -> Iterator[None]:
    """Inside, torch computes everything."""
    token = _torch_only.set(True)
    try:
        yield
    finally:
        _torch_only.reset(token)
