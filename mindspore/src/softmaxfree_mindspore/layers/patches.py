"""Patch embeddings: images to the maps that tokens are taken from."""

from collections.abc import Sequence

from mindspore import Tensor, nn, ops
from mindspore.common.initializer import HeNormal


def conv_embedding(in_chans: int, dim: int, strides: Sequence[int]) -> nn.SequentialCell:
    """A 3 x 3 Conv-BN-ReLU for every stride, all but the last of width 32."""
    widths = [in_chans, *[32] * (len(strides) - 1), dim]
    return nn.SequentialCell(
        [ConvNormAct(*sides, stride) for *sides, stride in zip(widths, widths[1:], strides)]
    )


class ConvNormAct(nn.Cell):
    """A 3 x 3 convolution, batch normalisation, ReLU."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            before,
            after,
            3,
            stride,
            pad_mode="pad",
            padding=1,
            has_bias=True,
            weight_init=HeNormal(mode="fan_out", nonlinearity="relu"),
            bias_init="zeros",
        )
        self.bn = nn.BatchNorm2d(after)

    def construct(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H / stride, W / stride), rounded up."""
        return ops.relu(self.bn(self.conv(x)))
