"""Patch embeddings: images to the maps that tokens are taken from."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import ConvNormAct
from torch import Tensor, nn

from ..ops.tracing import ceil_div
from .mlp import is_watched
from .samplers import fit


def conv_embedding(in_chans: int, dim: int, strides: Sequence[int]) -> nn.Sequential:
    """Makes overlapping patches: a 3 x 3 Conv-BN-ReLU a stride, of width 32 but for the last."""
    widths = [in_chans, *[32] * (len(strides) - 1), dim]
    return nn.Sequential(
        *(
            EmbeddingConv(before, after, 3, stride=stride, bias=True, act_layer=nn.ReLU)
            for before, after, stride in zip(widths, widths[1:], strides)
        )
    )


class EmbeddingConv(ConvNormAct):
    """timm's ConvNormAct, which computes small and wide maps as one matrix product on a CPU.

    There the weights are most of the data, and torch's convolution spends more time on reordering
    them, twice in the backward pass, than on the product.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, dim, H / stride, W / stride), rounded up."""
        if torch.compiler.is_compiling() or x.device.type != "cpu" or is_watched(self.conv):
            return super().forward(x)
        stride = self.conv.stride[0]
        places = x.shape[0] * ceil_div(x.shape[2], stride) * ceil_div(x.shape[3], stride)
        if places > x.shape[1]:
            return super().forward(x)
        return self.bn(convolve_by_product(x, self.conv))


def convolve_by_product(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Convolves with an odd kernel, padded by half of it: (B, C, H, W) -> (B, dim, H', W')."""
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    size = [ceil_div(side, stride) for side in x.shape[-2:]]
    windows = F.unfold(x, kernel, padding=kernel // 2, stride=stride).mT  # (B, H' W', C kernel^2)
    return F.linear(windows, conv.weight.flatten(1), conv.bias).mT.unflatten(-1, size)


def patch_embedding(in_chans: int, dim: int, strides: Sequence[int]) -> nn.Sequential:
    """Makes patches that do not overlap, of the product of the strides, with LayerNorm, as PVT."""
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
            patches = ceil_div(x.shape[dim], self.patch)
            x = fit(x, dim, x.shape[dim], patches * self.patch, replicate=True)
        return self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
