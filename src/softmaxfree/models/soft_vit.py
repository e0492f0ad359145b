"""SOFT and SOFT++ without a pyramid: a vision transformer with softmax-free attention.

The model of the paper's ablation of the pyramid, and of its figure of memory against tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..errors import UserError
from ..layers.blocks import PreNormBlock
from ..layers.patches import PatchProjection
from ..layers.registry import build_attention
from ..ops.tracing import ceil_div
from .backbone import Backbone, PositionEmbedding, default_cfg, pair, spread_drop_path, to_tokens
from .checkpoints import checkpoint_filter_fn
from .options import all_options, landmark_options

SIDE = 14
"""Tokens along a side at the usual size: 224 pixels in patches of 16."""


class SoftmaxFreeViT(Backbone):
    """A class token and the patches of an image, through blocks of one width.

    Args:
        img_size: Side, or (height, width), that position embeddings are learned for. Images of
            any other size are taken too: the embeddings are resized.
        patch_size: Side of a patch.
        in_chans: Channels of an image.
        num_classes: Width of the logits; 0 for no head.
        global_pool: Input of the head: `token`, the class token; `avg`, the average of all others;
            '' for all tokens.
        embed_dim, depth, num_heads: Width, number of blocks, heads.
        num_landmarks: Landmarks (a square number) at every size, so that cost is linear in the
            number of pixels. SOFT and SOFT++ have 49 by default.
        ratio: In place of `num_landmarks`: side of the window of tokens that becomes one landmark.
        attention: A name of `softmaxfree.layers.registry`, as of `SoftmaxFreeTransformer`.
        attention_options: Options of that attention which are not arguments of the model, such as
            `{"features": 64}`.
        tie_qk: Queries and keys share a projection; by default as the attention has it.
        sampler: How landmarks are made: `conv`, `avg`, `random` or `biased`.
        inverse, iters, ridge: How the landmark matrix is inverted, see `softmaxfree.pinv`.
        pad: `replicate` or `drop`, what becomes of sides that the ratio does not divide.
        value_conv: Size (odd) of the convolutions of the values; 0 for none.
        mlp_ratio: Width of the hidden layers, in units of `embed_dim`.
        drop_rate, drop_path_rate: Rates of dropout before the head and of stochastic depth.
        device, dtype: Of the weights.
    """

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 12,
        num_landmarks: int | None = None,
        ratio: int | None = None,
        attention: str = "softpp",
        attention_options: Mapping[str, Any] | None = None,
        tie_qk: bool | None = None,
        sampler: str | None = None,
        inverse: str | None = None,
        iters: int | None = None,
        ridge: float | None = None,
        pad: str | None = None,
        value_conv: int = 3,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if min(patch_size, embed_dim, depth) < 1:
            raise UserError(
                "patch_size, embed_dim and depth must be at least 1, "
                f"got {patch_size}, {embed_dim}, {depth}"
            )
        options = all_options(
            attention, attention_options, {"ratio": "ratio", "value_conv": "value_conv"},
            tie_qk=tie_qk, sampler=sampler, num_landmarks=num_landmarks, inverse=inverse,
            iters=iters, ridge=ridge, pad=pad,
        )  # fmt: skip
        windows = None if ratio is None else [ratio]
        options |= landmark_options(attention, windows, num_landmarks, [SIDE])[0]
        options |= {"value_conv": value_conv or None, "prefix_tokens": 1}
        height, width = pair(img_size, "img_size")
        grid = (ceil_div(height, patch_size), ceil_div(width, patch_size))
        with torch.device(device or torch.get_default_device()):
            super().__init__(in_chans)
            self.depth = depth
            self.embed = PatchProjection(in_chans, embed_dim, patch_size)
            self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
            trunc_normal_(self.cls_token, std=0.02)
            self.position = PositionEmbedding(grid, embed_dim, 1)
            self.blocks = nn.ModuleList()
            for rate in spread_drop_path(drop_path_rate, depth):
                layer = build_attention(attention, embed_dim, num_heads, max_size=grid, **options)
                self.blocks.append(
                    PreNormBlock(layer, embed_dim, mlp_ratio, drop_path=rate, eps=1e-6)
                )
            place = {"num_chs": embed_dim, "reduction": patch_size}
            self.feature_info = [place | {"module": f"blocks.{i}"} for i in range(depth)]
            self.add_head(embed_dim, num_classes, global_pool, drop_rate)
        self.to(dtype=dtype)

    @property
    def num_prefix_tokens(self) -> int:
        return 1

    def _embed(self, x: Tensor) -> tuple[Tensor, Sequence[int]]:
        """Images (B, in_chans, H, W) -> tokens (B, 1 + N, embed_dim) and their grid."""
        x, size = to_tokens(self.embed(x), self.cls_token)
        return self.position(x, size), size

    def _block(self, block: nn.Module, x: Tensor, size: Sequence[int]) -> Tensor:
        return checkpoint(block, x, size) if self.grad_checkpointing else block(x, size)

    def forward_tokens(self, x: Tensor) -> Tensor:
        x, size = self._embed(x)
        for block in self.blocks:
            x = self._block(block, x, size)
        return x

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Returns the results of the blocks, and the tokens of the last one.

        Args:
            x: (B, in_chans, H, W) images.
            indices: Numbers of the blocks; an int for that many of the last, None for all.
            return_prefix_tokens: Return the class token (B, 1, dim) beside each result.
            norm: Apply the final normalisation to all of them.
            stop_early: Stop after the last of these blocks.
            output_fmt: `NCHW` for maps, `NLC` for tokens (B, N, dim).
            intermediates_only: Return the results of the blocks alone.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        wanted, last = feature_take_indices(len(self.blocks), indices)
        x, size = self._embed(self.check(x))
        found: list[Any] = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._block(block, x, size)
            if i not in wanted:
                continue
            tokens = self.norm(x) if norm else x
            prefix, tokens = tokens[:, :1], tokens[:, 1:]
            if output_fmt == "NCHW":
                tokens = tokens.transpose(1, 2).unflatten(2, size)
            found.append((tokens, prefix) if return_prefix_tokens else tokens)
        return found if intermediates_only else (self.norm(x), found)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the blocks after the last of `indices`; returns their numbers."""
        wanted, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return wanted

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "position.grid", "position.prefix"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that tell the layer of a parameter, for learning rates that fall with depth."""
        return {
            "stem": r"^cls_token|^position|^embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


def _create(variant: str, pretrained: bool, **kwargs: Any) -> SoftmaxFreeViT:
    return build_model_with_cfg(
        SoftmaxFreeViT,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **kwargs,
    )


default_cfgs = generate_default_cfgs(
    {
        "soft_vit_small.untrained": default_cfg(pool_size=None, first_conv="embed.conv"),
        "softpp_vit_small.untrained": default_cfg(pool_size=None, first_conv="embed.conv"),
    }
)


@register_model
def soft_vit_small(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeViT:
    """SOFT without a pyramid: patches of 16 pixels, 12 blocks, width 384."""
    return _create("soft_vit_small", pretrained, **({"attention": "soft"} | kwargs))


@register_model
def softpp_vit_small(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeViT:
    """SOFT++ without a pyramid: patches of 16 pixels, 12 blocks, width 384."""
    return _create("softpp_vit_small", pretrained, **({"attention": "softpp"} | kwargs))
