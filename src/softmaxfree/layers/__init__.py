"""Modules: the attention layer, its samplers, the blocks."""

from .attention import SoftmaxFreeAttention
from .multihead import MultiHeadAttention
from .registry import register_attention

__all__ = ["MultiHeadAttention", "SoftmaxFreeAttention", "register_attention"]
