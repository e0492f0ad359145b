"""Multiply-adds of a model, with and without the inverses of its bottleneck matrices."""

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
    """Those of the inverses, which the paper leaves out of its figures."""


def cost(model: nn.Module, *shape: int) -> Cost:
    """Counts what a forward pass of one image (channels, height, width) takes."""
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
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.eval()(torch.zeros(1, *shape))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, counter.get_total_flops() / 2, inverse)


def inverse_products(attention: SoftmaxFreeAttention, m: int) -> float:
    """What an inverse costs on a CPU, in products of m x m matrices."""
    if attention.inverse in ("auto", "cholesky"):
        # A factor, a sixth of a product, and the inverse of it, a third; or solving instead.
        return 1 / 2 if m <= 128 else 1 / 6
    if attention.inverse == "exact":
        return 9 / 2 + 1
    return 2 * attention.iters + (attention.inverse == "backtrack")
