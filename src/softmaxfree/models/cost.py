"""The cost of a model: parameters, multiply-adds, memory that training keeps."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..layers.attention import SoftmaxFreeAttention


@dataclass(frozen=True)
class Cost:
    """Of one image."""

    parameters: int
    multiply_adds: float
    inverse: float
    """Multiply-adds of the inverses, which the paper does not count."""


def cost(model: nn.Module, *shape: int) -> Cost:
    """Counts the cost of a forward pass of one image (channels, height, width)."""
    return cost_of(model, _images(model, 1, *shape))


def cost_of(model: nn.Module, inputs: Any) -> Cost:
    """Counts the cost of a forward pass of any inputs, such as a detector's list of images."""
    inverse = 0.0

    def count(attention: SoftmaxFreeAttention, _: Any, landmarks: Tensor) -> None:
        nonlocal inverse
        stack, m = landmarks.shape[0] * landmarks.shape[1], landmarks.shape[2]
        inverse += stack * inverse_products(attention, m) * m**3

    hooks = [
        module.landmark_norm.register_forward_hook(
            lambda _, inputs, landmarks, attention=module: count(attention, inputs, landmarks)
        )
        for module in model.modules()
        if isinstance(module, SoftmaxFreeAttention)
    ]
    training = model.training
    # The counter expects a gradient of every trained parameter; some models have unused ones.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.requires_grad_(False)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.eval()(inputs)
    finally:
        model.train(training)
        for parameter in trained:
            parameter.requires_grad_()
        for hook in hooks:
            hook.remove()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, counter.get_total_flops() / 2, inverse)


def inverse_products(attention: SoftmaxFreeAttention, m: int) -> float:
    """Cost of an inverse on a CPU, in products of m x m matrices."""
    if attention.middle == "sums":
        return 0
    if attention.inverse in ("auto", "cholesky"):
        # A factor, a sixth of a product, and the inverse of it, a third; or solving instead.
        return 1 / 2 if m <= 128 else 1 / 6
    if attention.inverse == "exact":
        return 9 / 2 + 1
    return 2 * attention.iters + (attention.inverse == "backtrack")


def image_bytes(model: nn.Module, *shape: int, autocast: torch.dtype | None = None) -> int:
    """Bytes that each image adds to the memory kept for the backward pass.

    Measured as three images less two: a batch of one needs fewer copies, as its memory has several
    orders at once.
    """
    return kept_bytes(model, 3, *shape, autocast=autocast) - kept_bytes(
        model, 2, *shape, autocast=autocast
    )


def kept_bytes(model: nn.Module, *shape: int, autocast: torch.dtype | None = None) -> int:
    """Bytes that training keeps of images (B, channels, height, width) for the backward pass.

    Every storage counts once; parameters and buffers do not count.
    """
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    images = _images(model, *shape)
    precision = torch.autocast(images.device.type, dtype=autocast) if autocast else nullcontext()
    training = model.training
    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), precision:
            # Kept until all is counted: freed memory could serve two storages in turn.
            logits = model.train()(images)
    finally:
        model.train(training)
    del logits
    return sum(kept.values())


def _images(model: nn.Module, *shape: int) -> Tensor:
    """Black images on the device and in the type of the weights."""
    weight = next(model.parameters())
    return torch.zeros(shape, device=weight.device, dtype=weight.dtype)
