"""Helpers of the autograd functions: whether to record, and how to map them."""

import inspect
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Forward = TypeVar("Forward", bound=Callable[..., object])


def keep_signature(forward: Forward) -> Forward:
    """Stores a forward's signature; `Function.apply` would inspect it at every call, which takes
    longer than a small tensor operation."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def needs_apply(*tensors: Tensor | None) -> bool:
    """Whether a function of these has to be recorded, or transformed by `torch.func`.

    If not, its forward is called directly: `Function.apply` takes longer than several small
    tensor operations.
    """
    return needs_gradient(*tensors) or any(x is not None and is_wrapped(x) for x in tensors)


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for others inside a transform of `torch.func`, without storage."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


def is_readable(tensor: Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, nn.Parameter)  # others may stand for tensors without values
        and not is_wrapped(tensor)
    )


def mapped_axis_first(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """Moves the axis that vmap maps over to the front; a tensor without one is expanded."""
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
