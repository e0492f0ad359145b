"""What the autograd functions here share."""

import inspect
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Forward = TypeVar("Forward", bound=Callable[..., object])


def keep_signature(forward: Forward) -> Forward:
    """Stores a forward's signature, which `Function.apply` works out anew at every call.

    That takes longer than a small tensor operation.
    """
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def needs_apply(*tensors: Tensor | None) -> bool:
    """Whether a function of these has to be recorded, or transformed by `torch.func`.

    If not, its forward can be called as it is; `Function.apply` takes longer than several small
    tensor operations.
    """
    return needs_gradient(*tensors) or any(x is not None and is_wrapped(x) for x in tensors)


def is_wrapped(tensor: Tensor) -> bool:
    """Tensors inside transforms of `torch.func` stand for others and have no storage."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return True
    return False


def is_readable(tensor: Tensor) -> bool:
    """Whether its values can be looked at, and without waiting for a device."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, nn.Parameter)  # others may stand for tensors without values
        and not is_wrapped(tensor)
    )


def mapped_axis_first(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """The axis that vmap maps over as the first one; a tensor without it is repeated, unstored."""
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
