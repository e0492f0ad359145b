"""Refusals: each says what came, what was expected, and what to do."""

from mindspore import Tensor


def check_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must have a floating-point type, got {tensor.dtype}")


def check_tokens(**tensors: Tensor) -> None:
    """Token matrices: floating point, (..., tokens, width), with the same leading axes."""
    check_floating(**tensors)
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or tensor.size == 0:
            raise ValueError(f"{name} must be (..., tokens, width), got shape {tensor.shape}")
        if tensor.shape[:-2] != first.shape[:-2]:
            raise ValueError(
                f"{name} must have {first_name}'s leading axes (batch, heads), "
                f"got shape {tensor.shape} beside {first.shape}"
            )


def check_same_width(**tensors: Tensor) -> None:
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape[-1] != first.shape[-1]:
            raise ValueError(
                f"{name} must have {first_name}'s width {first.shape[-1]}, "
                f"got shape {tensor.shape} beside {first.shape}"
            )


def check_same_length(**tensors: Tensor) -> None:
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape[-2] != first.shape[-2]:
            raise ValueError(
                f"{name} must have as many tokens as {first_name}, {first.shape[-2]}, "
                f"got shape {tensor.shape} beside {first.shape}"
            )
