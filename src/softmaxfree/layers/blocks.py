"""Transformer blocks: attention and a feed-forward network, with residual connections."""

from timm.layers import DropPath
from torch import Tensor, nn

from .mlp import Mlp
from .samplers import Size


class Block(nn.Module):
    """Base of the two kinds of block.

    Args:
        attention: Called as `attention(x, size, mask=mask)`.
        dim: Width of the tokens.
        mlp_ratio: Width of the hidden layer of the network, in units of `dim`.
        act_layer: Activation of the hidden layer.
        drop_path: Rate of stochastic depth.
        eps: Added to the variance in the normalisations.
        drop: Rate of dropout, of the hidden layer and of what is added to the residual path.
    """

    def __init__(
        self,
        attention: nn.Module,
        dim: int,
        mlp_ratio: float = 4.0,
        act_layer: type[nn.Module] = nn.GELU,
        drop_path: float = 0.0,
        eps: float = 1e-5,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.norm1 = nn.LayerNorm(dim, eps)
        self.drop = nn.Dropout(drop) if drop > 0 else nn.Identity()
        self.mlp = Mlp(dim, round(dim * mlp_ratio), act_layer=act_layer, drop=drop)
        self.norm2 = nn.LayerNorm(dim, eps)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()


class PostNormBlock(Block):
    """The block of the pyramid's first stages: normalises each residual sum."""

    def forward(self, x: Tensor, size: Size | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        x = self.norm1(x + self.drop_path(self.drop(self.attention(x, size, mask=mask))))
        return self.norm2(x + self.drop_path(self.mlp(x)))


class PreNormBlock(Block):
    """The block of vision transformers: normalises the input of each branch."""

    def forward(self, x: Tensor, size: Size | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        x = x + self.drop_path(self.drop(self.attention(self.norm1(x), size, mask=mask)))
        return x + self.drop_path(self.mlp(self.norm2(x)))
