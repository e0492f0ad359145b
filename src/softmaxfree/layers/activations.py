"""The activations of the feed-forward networks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.backends import TORCH
from ..ops.batching import keep_signature, needs_apply


class TanhGELU(nn.Module):
    """GELU in its tanh form, x (1 + tanh(u)) / 2, as in the released models.

    Written as x sigmoid(2u), the same function takes less than half the time of torch's kernel
    on a CPU.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        here = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        if not here or torch.compiler.is_compiling():
            return F.gelu(x, approximate="tanh")
        return (_TanhGELU.apply if needs_apply(x) else _TanhGELU.forward)(x)


class _TanhGELU(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @keep_signature
    def forward(x: Tensor) -> Tensor:
        return TORCH.gelu(x, "tanh")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.func.vjp(lambda x: F.gelu(x, approximate="tanh"), x)[1](grad)[0]
        return TORCH.gelu_backward(grad, x, "tanh")


def gelu_form(act: nn.Module) -> str | None:
    """`none` or `tanh`, torch's name for the form of a GELU; None for other activations."""
    if type(act) is TanhGELU:
        return "tanh"
    return act.approximate if type(act) is nn.GELU else None


ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "gelu_tanh": TanhGELU}
"""Every activation by its name."""
