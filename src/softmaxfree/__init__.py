"""Softmax-free linear transformers: SOFT and SOFT++."""

from .layers import MultiHeadAttention, SoftmaxFreeAttention, register_attention
from .models import SoftmaxFreeTransformer, SoftmaxFreeViT, replace_attention, tie_qk
from .ops import gaussian_attention, gaussian_kernel, pinv, softmax_free_attention

__version__ = "0.1.0.dev0"

__all__ = [
    "MultiHeadAttention",
    "SoftmaxFreeAttention",
    "SoftmaxFreeTransformer",
    "SoftmaxFreeViT",
    "gaussian_attention",
    "gaussian_kernel",
    "pinv",
    "register_attention",
    "replace_attention",
    "softmax_free_attention",
    "tie_qk",
]
