"""Softmax-free linear transformers in MindSpore: SOFT, SOFT++ and softx."""

from .layers.attention import SoftmaxFreeAttention
from .models.checkpoints import load_weights, save_weights
from .models.soft import SoftmaxFreeTransformer, create_model, list_models
from .ops.attention import gaussian_attention, softmax_free_attention
from .ops.inverse import pinv
from .ops.kernel import gaussian_kernel

__all__ = [
    "SoftmaxFreeAttention",
    "SoftmaxFreeTransformer",
    "create_model",
    "gaussian_attention",
    "gaussian_kernel",
    "list_models",
    "load_weights",
    "pinv",
    "save_weights",
    "softmax_free_attention",
]
