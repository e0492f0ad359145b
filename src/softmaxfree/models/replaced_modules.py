"""Modules that stand in a timm model once its attention is replaced, or its queries are keys."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from ..errors import UserError
from ..layers.multihead import MultiHeadAttention
from ..layers.samplers import Size


class TiedProjection(nn.Module):
    """One projection for queries and keys, one for values, in place of timm's `qkv`."""

    def __init__(self, q: nn.Linear, v: nn.Linear) -> None:
        super().__init__()
        self.q, self.v = q, v

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N, 3 dim): queries, the same as keys, values."""
        q = self.q(x)
        return torch.cat([q, q, self.v(x)], -1)


class Grid:
    """The grid of the image that passes through a ViT, read by a hook of its patch embedding.

    Gradient checkpointing runs blocks again after other images have passed. So the grid is noted on
    the memory of the tokens, which a checkpoint keeps, before each block and its attention, and
    read there when the block runs again. If saved tensors are moved
    (`torch.autograd.graph.save_on_cpu`), all images before one backward pass must have the same
    grid.
    """

    def __init__(self, size: Size) -> None:
        self.size = size

    def __call__(self, embed: Any, inputs: tuple[Tensor, ...], tokens: Tensor) -> None:
        if tokens.ndim == 4:  # (B, H, W, dim), of models with dynamic_img_size
            self.size = tuple(tokens.shape[1:3])
        else:
            self.size = tuple(embed.dynamic_feat_size(tuple(inputs[0].shape[-2:])))

    def before_block(self, block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Hook before a block: notes the grid on the memory of its tokens."""
        self.of(inputs[0])

    def of(self, tokens: Tensor) -> Size:
        """The grid of tokens (B, prefix + N, dim), also when a checkpoint runs them again."""
        if not torch.compiler.is_compiling():
            try:
                memory: Any = tokens.untyped_storage()
            except NotImplementedError:  # tensors of torch.func have no storage
                return self.size
            self.size = memory.__dict__.setdefault("softmaxfree_grid", self.size)
        return self.size


def image_grid(core: Any) -> Grid:
    """The grid that the hooks of a ViT keep; adds the hooks if there are none."""
    embed = core.patch_embed
    for hook in embed._forward_hooks.values():
        if isinstance(hook, Grid):
            return hook
    grid = Grid(tuple(embed.grid_size))
    embed.register_forward_hook(grid)
    for block in core.blocks:
        block.register_forward_pre_hook(grid.before_block)
    return grid


def remove_grid(core: Any) -> None:
    """Removes the hooks of the grid from a ViT."""
    for module in core.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _of_grid(hook)]:
                del hooks[key]


def _of_grid(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", hook), Grid)


@dataclass(frozen=True)
class Keys:
    """The projection of keys that a tied attention cannot hold, and that of its queries."""

    q: nn.Linear
    k: nn.Linear

    def beside(self, q: nn.Linear) -> nn.Linear | None:
        """The keys' projection; None if the queries' has changed since."""
        for was, now in ((self.q.weight, q.weight), (self.q.bias, q.bias)):
            if now is not None and not now.is_meta and not torch.equal(was.to(now), now):
                return None
        return deepcopy(self.k).to(q.weight).train(q.training)


class Replaced(nn.Module):
    """An attention in the place of timm's, which it keeps for the way back.

    Args:
        layer: The attention.
        original: timm's, without the weights that the layer has taken over.
        tied: Whether timm's had one projection for queries and keys.
        keys: The projection of keys that the layer cannot hold.
    """

    def __init__(
        self, layer: MultiHeadAttention, original: Any, tied: bool, keys: Keys | None
    ) -> None:
        super().__init__()
        self.layer, self.tied, self.keys = layer, tied, keys
        self.proj_drop = original.proj_drop
        self._original = (original,)  # not a part: its weights are not the model's
        self.train(original.training)

    @property
    def original(self) -> Any:
        """timm's own attention."""
        return self._original[0]


class TokenAttention(Replaced):
    """A replaced attention of timm's ViT, called as the original."""

    def __init__(
        self,
        layer: MultiHeadAttention,
        original: Any,
        tied: bool,
        keys: Keys | None,
        grid: Grid,
    ) -> None:
        super().__init__(layer, original, tied, keys)
        self.grid = grid

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """(B, prefix + N, dim) -> the same, of an image's tokens."""
        if attn_mask is not None or is_causal:
            raise UserError(
                "an attention that was replaced takes no attn_mask and no is_causal; leave them "
                "out or put the original back"
            )
        return self.proj_drop(self.layer(x, self.grid.of(x)))


class MapAttention(Replaced):
    """Attention over a whole map, in a block of a Swin."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, dim) -> the same."""
        size = (x.shape[1], x.shape[2])
        return self.proj_drop(self.layer(x.flatten(1, 2), size)).unflatten(1, size)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Sets the window of the original, for when it is put back."""
        self.original.set_window_size(window_size)


class WholeMapBlock(SwinTransformerBlock):
    """A Swin's block with a replaced attention: no windows, no shifts."""

    def _attn(self, x: Tensor) -> Tensor:
        return self.attn(x)
