"""The backbones; importing them registers them in timm."""

from .soft import SoftmaxFreeTransformer
from .soft_vit import SoftmaxFreeViT

__all__ = ["SoftmaxFreeTransformer", "SoftmaxFreeViT"]
