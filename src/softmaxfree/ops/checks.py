"""Checks of arguments: each error says what came, what was expected, and what to do."""

import torch
from torch import Tensor


def check_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise ValueError(
                f"{name} must have a floating-point type, got {tensor.dtype}; "
                f"convert it with {name}.float()"
            )


def check_tokens(**tensors: Tensor) -> None:
    """Tokens must be floating point, at least (tokens, width), not empty, on one device."""
    check_floating(**tensors)
    (first_name, first), *others = tensors.items()
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            raise ValueError(f"{name} must be (..., tokens, width), got shape {shape(tensor)}")
        if tensor.numel() == 0:
            raise ValueError(f"{name} is empty: its shape is {shape(tensor)}")
    for name, tensor in others:
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device} and {first_name} on {first.device}; "
                "move them to one device"
            )


def check_same_width(**tensors: Tensor) -> None:
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape[-1] != first.shape[-1]:
            raise ValueError(
                f"{name} must have {first_name}'s width {first.shape[-1]}, "
                f"got shape {shape(tensor)} beside {shape(first)}"
            )


def check_same_length(k: Tensor, v: Tensor) -> None:
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"v must have as many tokens as k, {k.shape[-2]}, "
            f"got shape {shape(v)} beside {shape(k)}"
        )


def broadcast_leading(**tensors: Tensor) -> torch.Size:
    """The shape that the leading axes (batch, heads, ...) of all tensors broadcast to."""
    (_, first), *others = tensors.items()
    if all(tensor.shape[:-2] == first.shape[:-2] for _, tensor in others):
        return first.shape[:-2]
    try:
        return torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {shape(tensor)}" for name, tensor in tensors.items())
        raise ValueError(
            f"the leading axes (batch, heads) must be equal or 1, got {shapes}"
        ) from None


def check_mask(name: str, mask: Tensor, leading: torch.Size, tokens: int) -> None:
    """A key mask: boolean, True = keep, broadcastable to (*leading, tokens)."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be boolean with True = keep, got {mask.dtype}")
    expected = (*leading, tokens)
    fits = (
        0 < mask.ndim <= len(expected)
        and mask.shape[-1] == tokens
        and all(got in (1, want) for got, want in zip(mask.shape[::-1], expected[::-1]))
    )
    if fits:
        return
    hint = ""
    if mask.ndim >= 2 and mask.shape[-2:] == (tokens, tokens):
        hint = (
            "; a mask over pairs, a causal one among them, cannot be kept: every output passes "
            "through landmarks that have seen the whole sequence"
        )
    raise ValueError(
        f"{name} must be (..., {tokens}) broadcastable to {expected}, got {shape(mask)}{hint}"
    )


def finite_where_dropped(tokens: Tensor, mask: Tensor) -> Tensor:
    """Tokens (..., n, d) with 0 for NaN and infinity where a mask (..., n) drops them.

    Finite values stay, since a dropped key may be a query; but NaN times 0 would be NaN.
    """
    return tokens.masked_fill(~(mask.unsqueeze(-1) | tokens.isfinite()), 0)


def shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
