"""Modules that stand in a model once its attention is replaced, or its queries are keys."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from ..errors import UserError
from ..layers.multihead import MultiHeadAttention
from ..layers.samplers import Size
from ..ops.batching import is_wrapped

TOKEN_ATTENTIONS = (Attention, BeitAttention, EvaAttention, AttentionRope)
ORIGINALS = (*TOKEN_ATTENTIONS, WindowAttention, WindowAttentionV2, nn.MultiheadAttention)
"""The attentions of timm and torch that can be replaced; subclasses may compute anything."""


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
        if not torch.compiler.is_compiling() and not is_wrapped(tokens):
            memory: Any = tokens.untyped_storage()
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
    """An attention in the place of timm's or torch's, which it keeps for the way back.

    Args:
        layer: The attention.
        original: The one before, without the weights that the layer has taken over.
        tied: Whether the original had one projection for queries and keys.
        keys: The projection of keys that the layer cannot hold.
    """

    def __init__(
        self, layer: MultiHeadAttention, original: Any, tied: bool, keys: Keys | None
    ) -> None:
        super().__init__()
        self.layer, self.tied, self.keys = layer, tied, keys
        self.proj_drop = getattr(original, "proj_drop", nn.Identity())
        self._original = (original,)  # not a part: its weights are not the model's
        self.train(original.training)

    @property
    def original(self) -> Any:
        """timm's or torch's own attention."""
        return self._original[0]


class TokenAttention(Replaced):
    """A replaced attention of timm's ViT, BEiT or EVA, called as the original."""

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
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Tensor | None = None,
        shared_rel_pos_bias: None = None,
    ) -> Tensor:
        """(B, prefix + N, dim) -> the same, of an image's tokens, with EVA's rotary positions."""
        _refuse_masks(attn_mask, is_causal)
        rotate = None
        if rope is not None:
            half = getattr(self.original, "rotate_half", False)
            rotate = partial(_rotated, rope=rope, half=half, prefix=self.layer.prefix_tokens)
        return self.proj_drop(self.layer(x, self.grid.of(x), rotate=rotate))


def _rotated(tokens: Tensor, rope: Tensor, half: bool, prefix: int) -> Tensor:
    """Tokens (B, heads, prefix + N, d) with those of the grid turned by their positions."""
    grid = apply_rot_embed_cat(tokens[:, :, prefix:], rope, half=half).type_as(tokens)
    return torch.cat([tokens[:, :, :prefix], grid], 2)


def _refuse_masks(attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None or is_causal:
        raise UserError(
            "an attention that was replaced takes no attn_mask and no is_causal: landmarks are "
            "made of all tokens; leave them out or put the original back"
        )


class _Unfused:
    """In place of a weight: torch's encoders take no fast path, which computes softmax, with it."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


class SequenceAttention(Replaced):
    """A replaced `nn.MultiheadAttention`, called as the original; its weights are None."""

    # What nn.TransformerEncoder and its layers look at before they choose a path.
    in_proj_weight, in_proj_bias = _Unfused(), None

    @property
    def out_proj(self) -> nn.Module:
        """The projection of results."""
        return self.layer.proj

    @property
    def batch_first(self) -> bool:
        """Whether tokens come as (B, N, dim), not (N, B, dim)."""
        return bool(self.original.batch_first)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attends from the query to itself, or to the key, which must be the value too.

        Args:
            query: (B, N, dim), or (N, B, dim) without `batch_first`, or (N, dim).
            key, value: One tensor of the same layout.
            key_padding_mask: (B, L) or (L,), as of torch: True, or -inf, for the keys to drop.
            need_weights, average_attn_weights: Weights are not computed: they would be of
                quadratic size. `softmaxfree.recorded_attention` gives single rows of them.
            attn_mask, is_causal: Refused.

        Returns:
            The result in the layout of the query, and None.
        """
        _refuse_masks(attn_mask, is_causal)
        if key is not value:
            raise UserError(
                "an attention that was replaced makes keys and values of one tensor, and key and "
                "value are two; pass the same one as both, or put the original back"
            )
        if query.is_nested:
            raise UserError(
                "an attention that was replaced takes no nested tensors; pass padded ones with a "
                "key_padding_mask, and replace the attention in all layers of a TransformerEncoder"
            )
        x = self._batch_first(query)
        context = None if key is query else self._batch_first(key)
        out = self.layer(x, context=context, mask=_kept(key_padding_mask))
        if query.ndim == 2:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)


def _kept(padding: Tensor | None) -> Tensor | None:
    """torch's mask of the keys to drop -> (B, L), True for those to keep."""
    if padding is None:
        return None
    if padding.dtype == torch.bool:
        kept = ~padding
    else:
        kept = padding == 0
        if not torch.compiler.is_compiling() and not (kept | padding.isneginf()).all():
            raise UserError(
                "key_padding_mask may be boolean, or hold 0 and -inf, and it holds other numbers; "
                "pass key_padding_mask != 0 if they mark the keys to drop"
            )
    return kept.unsqueeze(0) if kept.ndim == 1 else kept


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


class WholeMapBlockV2(SwinTransformerV2Block):
    """The same of Swin V2."""

    _attn = WholeMapBlock._attn


WHOLE_MAP: dict[type, type] = {
    SwinTransformerBlock: WholeMapBlock,
    SwinTransformerV2Block: WholeMapBlockV2,
}
"""Blocks of a Swin, and what they are with a replaced attention."""
