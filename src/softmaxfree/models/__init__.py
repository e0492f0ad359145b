"""The backbones; importing them registers them in timm."""

from . import variants
from .replace import replace_attention, tie_qk
from .soft import SoftmaxFreeTransformer
from .soft_vit import SoftmaxFreeViT

__all__ = [
    "SoftmaxFreeTransformer",
    "SoftmaxFreeViT",
    "replace_attention",
    "tie_qk",
    "variants",
]
