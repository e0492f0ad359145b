"""Softmax-free linear transformers: SOFT and SOFT++."""

from .threads import choose_waiting, started_as_command

if started_as_command():
    choose_waiting()  # OpenMP reads this when the imports below load torch

from .analysis import attention_rows, diagnose, recorded_attention
from .layers import MultiHeadAttention, SoftmaxFreeAttention, register_attention
from .models import SoftmaxFreeTransformer, SoftmaxFreeViT, replace_attention, tie_qk
from .ops import gaussian_attention, gaussian_kernel, pinv, softmax_free_attention

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
