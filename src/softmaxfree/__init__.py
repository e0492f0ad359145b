"""Softmax-free linear transformers: SOFT and SOFT++."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .threads import choose_waiting, started_as_command

if TYPE_CHECKING or not started_as_command():
    from .analysis import attention_rows, diagnose, recorded_attention
    from .layers import MultiHeadAttention, SoftmaxFreeAttention, register_attention
    from .models import SoftmaxFreeTransformer, SoftmaxFreeViT, replace_attention, tie_qk
    from .ops import gaussian_attention, gaussian_kernel, pinv, softmax_free_attention
else:
    choose_waiting()  # OpenMP reads this when torch is loaded

    def __getattr__(name: str) -> Any:
        """In a command all of this is imported when it is needed: to print help, torch is not."""
        for part in ("analysis", "layers", "models", "ops") if name in __all__ else ():
            if hasattr(module := import_module(f".{part}", __name__), name):
                return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0.dev0"

__all__ = [
    "MultiHeadAttention",
    "SoftmaxFreeAttention",
    "SoftmaxFreeTransformer",
    "SoftmaxFreeViT",
    "attention_rows",
    "diagnose",
    "gaussian_attention",
    "gaussian_kernel",
    "pinv",
    "recorded_attention",
    "register_attention",
    "replace_attention",
    "softmax_free_attention",
    "tie_qk",
]
