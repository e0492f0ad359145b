"""Transformer blocks: attention and a feed-forward network, with residual connections."""

from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from .samplers import Size


class PostNormBlock(nn.Module):
    """The block of the released models: each residual sum is normalised after it is taken.

    Args:
        attention: Called as `attention(x, size, mask=mask)`.
        dim: Width of the tokens.
        mlp_ratio: Width of the hidden layer, in units of `dim`.
        act_layer: Its activation.
        drop_path: Rate of stochastic depth.
    """

    def __init__(
        self,
        attention: nn.Module,
        dim: int,
        mlp_ratio: float = 4.0,
        act_layer: type[nn.Module] = nn.GELU,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.norm1 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer)
        self.norm2 = nn.LayerNorm(dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, size: Size | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, N, dim) -> (B, N, dim)."""
        x = self.norm1(x + self.drop_path(self.attention(x, size, mask=mask)))
        return self.norm2(x + self.drop_path(self.mlp(x)))
