"""UperNet, FPN, PSPNet and DeepLabV3+ of segmentation_models.pytorch, and SETR-PUP."""

from collections.abc import Callable
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..imports import needs
from .build import BackboneConfig
from .maps import Maps, build_body

with needs("segmentation", "a segmenter"):
    from segmentation_models_pytorch.base.initialization import initialize_decoder, initialize_head
    from segmentation_models_pytorch.base.modules import Conv2dReLU
    from segmentation_models_pytorch.decoders.deeplabv3.decoder import DeepLabV3PlusDecoder
    from segmentation_models_pytorch.decoders.fpn.decoder import FPNDecoder
    from segmentation_models_pytorch.decoders.pspnet.decoder import PSPDecoder
    from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder

_DEPTH = 5
"""What segmentation_models.pytorch calls the depth of four maps from stride 4 on."""


def upernet(channels: list[int], width: int) -> nn.Module:
    return UPerNetDecoder(channels, _DEPTH, width)


def fpn(channels: list[int], width: int) -> nn.Module:
    if width % 64:  # its norms have 32 groups, of half the width
        raise UserError(f"the width of decoder fpn must be a multiple of 64, got {width}")
    return FPNDecoder(channels, _DEPTH, pyramid_channels=width, segmentation_channels=width // 2)


def pspnet(channels: list[int], width: int) -> nn.Module:
    """Pools the last map, of stride 32: attention has no dilation to keep it larger."""
    return PSPDecoder(channels, out_channels=width)


def deeplabv3plus(channels: list[int], width: int) -> nn.Module:
    """On maps of strides 32 and 4: attention has no dilation to keep the last one larger."""
    decoder = DeepLabV3PlusDecoder(
        channels,
        _DEPTH,
        width,
        atrous_rates=(12, 24, 36),
        output_stride=16,
        aspp_separable=True,
        aspp_dropout=0.5,
    )
    decoder.up = nn.Upsample(scale_factor=8, mode="bilinear", align_corners=True)
    return decoder


def _convolution(channels: int, width: int) -> nn.Module:
    """3 x 3, normalised and rectified."""
    return Conv2dReLU(channels, width, kernel_size=3, padding=1, use_norm="batchnorm")


class ProgressiveUpsampling(nn.Module):
    """SETR's decoder PUP: four convolutions, each followed by a doubling of the sides."""

    def __init__(self, channels: list[int], width: int) -> None:
        super().__init__()
        widths = [channels[-1], *[width] * 4]
        self.blocks = nn.ModuleList(_convolution(a, b) for a, b in pairwise(widths))

    def forward(self, maps: list[Tensor]) -> Tensor:
        """The last map (B, C, h, w) -> (B, width, 16 h, 16 w)."""
        x = maps[-1]
        for block in self.blocks:
            x = F.interpolate(block(x), scale_factor=2, mode="bilinear", align_corners=False)
        return x


DECODERS: dict[str, tuple[Callable[[list[int], int], nn.Module], int]] = {
    "upernet": (upernet, 4),
    "fpn": (fpn, 4),
    "pspnet": (pspnet, 4),
    "deeplabv3plus": (deeplabv3plus, 4),
    "setr_pup": (ProgressiveUpsampling, 1),
}
"""What makes a decoder of the maps' channels and a width, and how many maps it takes."""


class Segmenter(Maps):
    """Classes of all pixels: a backbone, a decoder of its maps and, in training, a second head.

    Args:
        body: A model of timm that tells its intermediate maps.
        decoder: Name of one in the table above.
        num_classes: Channels of the result.
        width: Of the decoder.
        auxiliary: Add a head of 256 channels on the map before the last, whose loss helps the
            backbone to learn.
    """

    def __init__(
        self, body: nn.Module, decoder: str, num_classes: int, width: int, auxiliary: bool
    ) -> None:
        if decoder not in DECODERS:
            raise UserError(f"decoder must be one of {', '.join(DECODERS)}, got {decoder!r}")
        make, levels = DECODERS[decoder]
        super().__init__(body, levels)
        # segmentation_models.pytorch counts from the image on, and has a map of stride 2.
        self.decoder = make([3, 0, *self.channels], width)
        initialize_decoder(self.decoder)
        out = getattr(self.decoder, "out_channels", width)
        self.head = nn.Conv2d(out, num_classes, kernel_size=1)
        self.auxiliary: nn.Module | None = None
        if auxiliary:
            self.auxiliary = nn.Sequential(
                Conv2dReLU(
                    self.channels[-2:][0], 256, kernel_size=3, padding=1, use_norm="batchnorm"
                ),
                nn.Dropout2d(0.1),
                nn.Conv2d(256, num_classes, kernel_size=1),
            )
            initialize_decoder(self.auxiliary[0])
            initialize_head(self.auxiliary[-1])
        initialize_head(self.head)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits (B, num_classes, H, W) of images (B, 3, H, W), and in training those of the
        auxiliary head."""
        height, width = images.shape[-2:]
        stride = self.strides[-1]
        padded = F.pad(images, (0, -width % stride, 0, -height % stride), mode="replicate")
        maps = self.maps(padded)
        nothing = images.new_empty(images.shape[0], 0, 1, 1)

        def full(logits: Tensor) -> Tensor:
            size = padded.shape[-2:]
            larger = F.interpolate(logits, size, mode="bilinear", align_corners=False)
            return larger[..., :height, :width]

        second = None
        if self.auxiliary is not None and self.training:
            second = full(self.auxiliary(maps[-2:][0]))
        return full(self.head(self.decoder([padded, nothing, *maps]))), second


def build_segmenter(
    decoder: str,
    num_classes: int,
    backbone: BackboneConfig | str,
    width: int = 512,
    auxiliary: bool = True,
) -> Segmenter:
    """A segmenter over a backbone of timm's, for images of any size."""
    return Segmenter(build_body(backbone), decoder, num_classes, width, auxiliary)
