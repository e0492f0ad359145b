"""Tensors in, tensors out: the Gaussian kernel, the inverse, the attention."""

from . import flops as flops  # registers formulas
from .attention import gaussian_attention, softmax_free_attention
from .inverse import pinv
from .kernel import gaussian_kernel

__all__ = ["gaussian_attention", "gaussian_kernel", "pinv", "softmax_free_attention"]
