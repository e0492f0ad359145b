"""Softmax-free linear transformers: SOFT and SOFT++."""

from .layers import SoftmaxFreeAttention
from .models import SoftmaxFreeTransformer, SoftmaxFreeViT
from .ops import gaussian_attention, gaussian_kernel, pinv, softmax_free_attention

__version__ = "0.1.0.dev0"

__all__ = [
    "SoftmaxFreeAttention",
    "SoftmaxFreeTransformer",
    "SoftmaxFreeViT",
    "gaussian_attention",
    "gaussian_kernel",
    "pinv",
    "softmax_free_attention",
]
