"""Modules: the attention layer, its samplers, the blocks."""

from .attention import SoftmaxFreeAttention

__all__ = ["SoftmaxFreeAttention"]
