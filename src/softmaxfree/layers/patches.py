"""Patch embeddings: images to the maps that tokens are taken from."""

import math
from collections.abc import Sequence

from timm.layers import ConvNormAct
from torch import Tensor, nn

from .samplers import fit


def conv_embedding(in_chans: int, dim: int, strides: Sequence[int]) -> nn.Sequential:
    """Overlapping: a 3 x 3 Conv-BN-ReLU for every stride, all but the last of width 32."""
    widths = [in_chans, *[32] * (len(strides) - 1), dim]
    return nn.Sequential(
        *(
            ConvNormAct(before, after, 3, stride=stride, bias=True, act_layer=nn.ReLU)
            for before, after, stride in zip(widths, widths[1:], strides)
        )
    )


def patch_embedding(in_chans: int, dim: int, strides: Sequence[int]) -> nn.Sequential:
    """Not overlapping: patches of all strides together, and LayerNorm, as in PVT."""
    return nn.Sequential(PatchProjection(in_chans, dim, math.prod(strides), norm=True))


class PatchProjection(nn.Module):
    """A convolution of kernel = stride; sides that it does not divide are padded by replication."""

    def __init__(self, in_chans: int, dim: int, patch: int, norm: bool = False) -> None:
        super().__init__()
        self.patch = patch
        self.conv = nn.Conv2d(in_chans, dim, patch, patch)
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, dim, H / patch, W / patch), rounded up."""
        for dim in (-2, -1):
            patches = -(-x.shape[dim] // self.patch)
            x = fit(x, dim, x.shape[dim], patches * self.patch, replicate=True)
        return self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
