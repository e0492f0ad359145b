"""SOFT and SOFT++: a pyramid of four stages with softmax-free attention.

Lu, Zhang, Zhu, Feng, Xiang, Zhang: Softmax-free Linear Transformers, IJCV 2024.

The sizes that are registered in timm are in `variants.py`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..errors import UserError
from ..layers.activations import ACTIVATIONS
from ..layers.blocks import PostNormBlock, PreNormBlock
from ..layers.patches import conv_embedding, patch_embedding
from ..layers.registry import build_attention
from ..ops.tracing import ceil_div
from .backbone import (
    Backbone,
    ConvPosition,
    PositionEmbedding,
    pair,
    spread_drop_path,
    to_tokens,
)
from .options import all_options, landmark_options

STAGE4 = ("soft", "softmax", "gaussian")
POSITIONS = ("learned", "conv")
SIDES = {4: (56, 28, 14, 7), 2: (16, 8, 4, 2)}
"""Strides of the stem, and tokens along a side of each stage at the image size it is for: 224
pixels, or 32."""


@dataclass(frozen=True)
class StageStyle:
    """Arguments of `SoftmaxFreeTransformer` that all stages share."""

    attention: str
    options: Mapping[str, Any]
    """Options of the attention."""
    stage4: str
    act_layer: str
    overlap: bool
    pre_norm: bool
    position: str
    class_token: bool

    def __post_init__(self) -> None:
        _check_choice("stage4", self.stage4, STAGE4)
        _check_choice("position", self.position, POSITIONS)
        _check_choice("act_layer", self.act_layer, ACTIVATIONS)


@dataclass(frozen=True)
class StagePlan:
    """Arguments that differ from stage to stage."""

    in_chans: int
    dim: int
    depth: int
    num_heads: int
    value_conv: int
    mlp_ratio: float
    strides: Sequence[int]
    """Strides of the convolutions that embed the patches."""
    reduction: int
    """Pixels along the side of a token."""
    grid: tuple[int, int]
    """Grid of the tokens, at the model's image size."""
    last: bool


class Stage(nn.Module):
    """A patch embedding, positions, blocks; in the last stage a class token, if there is one.

    Args:
        style, plan: What it is built of.
        landmarks: `ratio` and `num_landmarks` of its attention.
        rates: Rates of stochastic depth, of its blocks first.
    """

    def __init__(
        self,
        style: StageStyle,
        plan: StagePlan,
        landmarks: Mapping[str, int],
        rates: Iterator[float],
    ) -> None:
        super().__init__()
        dim, prefix = plan.dim, int(plan.last and style.class_token)
        act = nn.GELU if plan.last else ACTIVATIONS[style.act_layer]
        block, eps = (PreNormBlock, 1e-6) if plan.last or style.pre_norm else (PostNormBlock, 1e-5)
        blocks: list[nn.Module] = []
        for _ in range(plan.depth):
            layer = build_attention(
                style.stage4 if plan.last and style.stage4 != "soft" else style.attention,
                dim,
                plan.num_heads,
                value_conv=plan.value_conv or None,
                prefix_tokens=prefix,
                max_size=plan.grid,
                **{**style.options, **landmarks},
            )
            blocks.append(block(layer, dim, plan.mlp_ratio, act, next(rates), eps))
        embedding = conv_embedding if style.overlap else patch_embedding
        self.grad_checkpointing = False
        self.prefix_tokens = prefix
        self.embed = embedding(plan.in_chans, dim, plan.strides)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if prefix else None
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)
        self.position = (
            PositionEmbedding(plan.grid, dim, prefix)
            if style.position == "learned"
            else ConvPosition(dim, prefix)
        )
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, Sequence[int]]:
        """A map (B, C, H, W) -> tokens (B, prefix + N, dim) and their grid."""
        x, size = to_tokens(self.embed(x), self.cls_token)
        x = self.position(x, size)
        for block in self.blocks:
            x = checkpoint(block, x, size) if self.grad_checkpointing else block(x, size)
        return x, size

    def to_map(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """Tokens (B, prefix + N, dim) -> a map (B, dim, H, W)."""
        return x[:, self.prefix_tokens :].transpose(1, 2).unflatten(2, size)


class SoftmaxFreeTransformer(Backbone):
    """The pyramid: four stages of strides 4, 8, 16 and 32.

    Args:
        img_size: Side, or (height, width), that position embeddings are learned for. Images of
            any other size are taken too: the embeddings are resized.
        in_chans: Channels of an image.
        num_classes: Width of the logits; 0 for no head.
        global_pool: Input of the head: `token`, the class token; `avg`, the average of all others;
            '' for all tokens.
        embed_dims, depths: Width and number of blocks of each stage.
        num_heads: Heads of each stage; of width 32 if not given.
        num_landmarks: Landmarks (a square number) in every stage and at every size, so that cost is
            linear in the number of pixels. SOFT and SOFT++ have 49 by default.
        ratios: In place of `num_landmarks`: side of the window of tokens that becomes one landmark,
            in each stage, so that their number grows with the image. With both, landmarks are
            averages over what the windows give.
        attention: A name of `softmaxfree.layers.registry`, such as `soft`, `softpp`, `softx`,
            `softmax`, `linformer`, `spatial_reduction`, `performer`, `nystromformer`, `agent`,
            `reformer`, `skyformer` or `gaussian`.
        attention_options: Options of that attention which are not arguments of the model, such as
            `{"features": 64}`.
        stage4: Attention of the last stage: `soft` for that of the others, `softmax`, `gaussian`.
        tie_qk: Queries and keys share a projection; by default as the attention has it.
        sampler: How landmarks are made: `conv`, `avg`, `random` or `biased`.
        inverse, iters, ridge: How the landmark matrix is inverted, see `softmaxfree.pinv`.
        pad: `replicate` or `drop`, what becomes of sides that a ratio does not divide.
        value_conv: Sizes (odd) of the convolutions of the values, one for each stage or one for
            all; 0 for none.
        overlap: Embed patches by overlapping convolutions; if not, as PVT does.
        pre_norm: Normalise the input of each branch in all stages, as PVT does; if not, in the
            last stage only, and residual sums in the others.
        class_token: Whether the last stage has a token beside those of the image.
        position: How tokens know their places: `learned` embeddings, or a convolution (`conv`).
        stem_stride: Stride of the first patch embedding: 4, or 2 for small images.
        mlp_ratios: Width of the hidden layers, in units of the stage's.
        act_layer: Activation in the first three stages: `gelu`, or `gelu_tanh` as released.
        drop_rate, drop_path_rate: Rates of dropout before the head and of stochastic depth.
        device, dtype: Of the weights.
    """

    stages: Any  # a ModuleList of Stage; torch's type does not say of what

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 5, 2),
        num_heads: Sequence[int] | None = None,
        num_landmarks: int | None = None,
        ratios: int | Sequence[int] | None = None,
        attention: str = "softpp",
        attention_options: Mapping[str, Any] | None = None,
        stage4: str = "soft",
        tie_qk: bool | None = None,
        sampler: str | None = None,
        inverse: str | None = None,
        iters: int | None = None,
        ridge: float | None = None,
        pad: str | None = None,
        value_conv: int | Sequence[int] = (9, 5, 3, 0),
        overlap: bool = True,
        pre_norm: bool = False,
        class_token: bool = True,
        position: str = "learned",
        stem_stride: int = 4,
        mlp_ratios: float | Sequence[float] = 4.0,
        act_layer: str = "gelu",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = all_options(
            attention, attention_options, {"ratio": "ratios", "value_conv": "value_conv"},
            tie_qk=tie_qk, sampler=sampler, num_landmarks=num_landmarks, inverse=inverse,
            iters=iters, ridge=ridge, pad=pad,
        )  # fmt: skip
        style = StageStyle(
            attention, options, stage4, act_layer, overlap, pre_norm, position, class_token
        )
        plans = _plans(
            img_size, in_chans, stem_stride, embed_dims, depths, num_heads, value_conv, mlp_ratios
        )
        windows = None if ratios is None else _four("ratios", ratios)
        landmarks = landmark_options(attention, windows, num_landmarks, SIDES[stem_stride])
        with torch.device(device or torch.get_default_device()):
            super().__init__(in_chans)
            self.num_stages = 4
            rates = iter(spread_drop_path(drop_path_rate, sum(plan.depth for plan in plans)))
            self.stages = nn.ModuleList(
                Stage(style, plan, own, rates) for plan, own in zip(plans, landmarks)
            )
            self.feature_info = [
                {"num_chs": plan.dim, "reduction": plan.reduction, "module": f"stages.{i}"}
                for i, plan in enumerate(plans)
            ]
            self.add_head(plans[-1].dim, num_classes, global_pool, drop_rate)
        self.to(dtype=dtype)

    @property
    def num_prefix_tokens(self) -> int:
        return self.stages[-1].prefix_tokens

    def forward_tokens(self, x: Tensor) -> Tensor:
        x, size = self.stages[0](x)
        for before, stage in pairwise(self.stages):
            x, size = stage(before.to_map(x, size))
        return x

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Returns the maps of the stages, and the tokens of the last one.

        Args:
            x: (B, in_chans, H, W) images.
            indices: Numbers of the stages; an int for that many of the last, None for all.
            norm: Apply the final normalisation to the last stage's map; the others have none.
            stop_early: Stop after the last of these stages.
            output_fmt: `NCHW`.
            intermediates_only: Return the maps alone.
        """
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        wanted, last = feature_take_indices(len(self.stages), indices)
        x, maps = self.check(x), []
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            tokens, size = stage(x)
            x = stage.to_map(tokens, size)
            if i in wanted:
                normed = norm and i == self.num_stages - 1
                maps.append(stage.to_map(self.norm(tokens), size) if normed else x)
        return maps if intermediates_only else (self.norm(tokens), maps)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the stages after the last of `indices`; returns their numbers."""
        wanted, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm or last + 1 < self.num_stages:
            self.norm = nn.Identity()
        self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head:
            self.reset_classifier(0, "")
        return wanted

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        return {
            name
            for name, _ in self.named_parameters()
            if ".position." in name or name.endswith("cls_token")
        }

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that tell the layer of a parameter, for learning rates that fall with depth."""
        if coarse:
            return {"stem": r"^stages\.0\.(?:embed|position)", "blocks": r"^stages\.(\d+)"}
        return {
            "stem": r"^stages\.0\.(?:embed|position)",
            "blocks": [
                (r"^stages\.(\d+)\.(?:embed|position|cls_token)", (-1,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ],
        }


def _plans(
    img_size: int | Sequence[int],
    in_chans: int,
    stem_stride: int,
    embed_dims: Sequence[int],
    depths: Sequence[int],
    num_heads: Sequence[int] | None,
    value_conv: int | Sequence[int],
    mlp_ratios: float | Sequence[float],
) -> list[StagePlan]:
    """One plan for each stage; arguments as of `SoftmaxFreeTransformer`."""
    if stem_stride not in SIDES:
        raise UserError(f"stem_stride must be 4 or 2, got {stem_stride}")
    dims, depths = _four("embed_dims", embed_dims), _four("depths", depths)
    heads = _four("num_heads", num_heads or [max(dim // 32, 1) for dim in dims])
    kernels, hidden = _four("value_conv", value_conv, 0), _four("mlp_ratios", mlp_ratios, 0)
    height, width = pair(img_size, "img_size")
    plans = []
    for i in range(4):
        reduction = stem_stride * 2**i
        plans.append(
            StagePlan(
                dims[i - 1] if i else in_chans, dims[i], depths[i], heads[i], kernels[i], hidden[i],
                strides=(2,) if i else (2, 1, stem_stride // 2),
                reduction=reduction,
                grid=(ceil_div(height, reduction), ceil_div(width, reduction)),
                last=i == 3,
            )
        )  # fmt: skip
    return plans


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _four(name: str, values: Any, least: float = 1) -> tuple[Any, ...]:
    """One value for each stage; a number stands for all."""
    four = (values,) * 4 if isinstance(values, int | float) else tuple(values)
    if len(four) != 4 or min(four) < least:
        raise UserError(f"{name} must be 4 numbers, {least} or more, got {values!r}")
    return four
