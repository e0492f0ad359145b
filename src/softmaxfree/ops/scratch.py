"""Memory for temporaries, kept from call to call.

On a CPU the first use of fresh memory costs a page fault for every 4 KiB, which for tiles of a
megabyte adds up to as much as the matrix products that fill them.
"""

import math
import threading

import torch
from torch import Tensor

_LARGEST = 8 * 2**20
"""Bytes that are kept for one purpose, in one type, by one thread."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}


_kept = _Kept()


def scratch(purpose: str, like: Tensor, *shape: int) -> Tensor:
    """An uninitialised tensor that the next call for the same purpose overwrites."""
    size = math.prod(shape)
    # Subclasses stand for tensors that are not really there.
    ordinary = like.device.type == "cpu" and type(like) is Tensor
    if not ordinary or size * like.element_size() > _LARGEST:
        return like.new_empty(shape)
    buffer = _kept.buffers.get((purpose, like.dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=like.dtype)
        _kept.buffers[purpose, like.dtype] = buffer
    return buffer[:size].view(shape)
