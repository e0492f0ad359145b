"""Softmax-free linear transformers: SOFT and SOFT++."""

from .layers import SoftmaxFreeAttention
from .ops import gaussian_attention, gaussian_kernel, pinv, softmax_free_attention

__version__ = "0.1.0.dev0"

__all__ = [
    "SoftmaxFreeAttention",
    "gaussian_attention",
    "gaussian_kernel",
    "pinv",
    "softmax_free_attention",
]
