"""Softmax-free linear transformers: SOFT and SOFT++."""

from .ops import gaussian_attention, gaussian_kernel, pinv, softmax_free_attention

__all__ = ["gaussian_attention", "gaussian_kernel", "pinv", "softmax_free_attention"]
