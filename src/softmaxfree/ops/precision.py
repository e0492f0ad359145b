"""In which precision the operations compute, whatever precision the caller works in."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest of the tensors' types, and float32 at least."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Keeps autocast from lowering the products computed inside."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has none
        return nullcontext()
    return torch.autocast(device, enabled=False)


def tiny(dtype: torch.dtype) -> float:
    """A divisor's floor: neither it, nor its square, nor its inverse leaves the type's range."""
    return torch.finfo(dtype).tiny ** 0.5
