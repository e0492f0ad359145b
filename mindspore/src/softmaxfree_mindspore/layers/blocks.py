"""Transformer blocks: attention and a feed-forward network, with residual connections."""

from mindspore import Tensor, nn, ops

from .attention import dense, layer_norm
from .samplers import Size

ACTIVATIONS = ("gelu", "gelu_tanh")
"""`gelu_tanh` is what the released models have."""


class Mlp(nn.Cell):
    """Two linear layers with GELU between them, in its erf or its tanh form."""

    def __init__(self, dim: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.fc1 = dense(dim, hidden)
        self.act = nn.GELU(approximate=activation == "gelu_tanh")
        self.fc2 = dense(hidden, dim)

    def construct(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return self.fc2(self.act(self.fc1(x)))


class DropPath(nn.Cell):
    """Stochastic depth: in training a branch is left out for some samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.kept = nn.Dropout(p=rate)

    def construct(self, x: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        return x * self.kept(ops.ones((x.shape[0], 1, 1), x.dtype))


class Block(nn.Cell):
    """What the two kinds of block share.

    Args:
        attention: Called as `attention(x, size)`.
        dim: Width of the tokens.
        mlp_ratio: Width of the hidden layer, in units of `dim`.
        activation: Its activation, one of `ACTIVATIONS`.
        drop_path: Rate of stochastic depth.
        eps: Added to the variance in the normalisations.
    """

    def __init__(
        self,
        attention: nn.Cell,
        dim: int,
        mlp_ratio: float = 4.0,
        activation: str = "gelu",
        drop_path: float = 0.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.norm1 = layer_norm(dim, eps)
        self.mlp = Mlp(dim, round(dim * mlp_ratio), activation)
        self.norm2 = layer_norm(dim, eps)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()


class PostNormBlock(Block):
    """The block of the pyramid's first stages: each residual sum is normalised once taken."""

    def construct(self, x: Tensor, size: Size) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        x = self.norm1(x + self.drop_path(self.attention(x, size)))
        return self.norm2(x + self.drop_path(self.mlp(x)))


class PreNormBlock(Block):
    """The block of vision transformers: the input of each branch is normalised."""

    def construct(self, x: Tensor, size: Size) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        x = x + self.drop_path(self.attention(self.norm1(x), size))
        return x + self.drop_path(self.mlp(self.norm2(x)))
