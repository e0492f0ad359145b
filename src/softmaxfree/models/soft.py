"""SOFT and SOFT++: a pyramid of four stages with softmax-free attention.

Lu, Zhang, Zhu, Feng, Xiang, Zhang: Softmax-free Linear Transformers, IJCV 2024.

Two families carry the name. The journal's table has the softmax-free attention in all stages
(`soft_tiny` to `softpp_large`); the authors' released code has softmax in the last one
(`soft_tiny_fudan` to `softpp_huge_fudan`), and only for it are there checkpoints.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..errors import UserError
from ..layers.activations import ACTIVATIONS
from ..layers.blocks import PostNormBlock, PreNormBlock
from ..layers.patches import conv_embedding, patch_embedding
from ..layers.registry import build_attention, chosen_options
from ..ops.tracing import ceil_div
from .backbone import (
    Backbone,
    ConvPosition,
    PositionEmbedding,
    default_cfg,
    pair,
    spread_drop_path,
    to_tokens,
)
from .checkpoints import checkpoint_filter_fn

STAGE4 = ("soft", "softmax", "gaussian")
POSITIONS = ("learned", "conv")
FROM_MODEL = ("ndim", "max_size", "prefix_tokens")
"""Options of an attention that follow from the model it is in."""


class Stage(nn.Module):
    """A patch embedding, positions, a class token in the last stage, and blocks."""

    def __init__(
        self,
        embed: nn.Module,
        dim: int,
        grid: tuple[int, int],
        blocks: list[nn.Module],
        class_token: bool,
        position: str,
    ) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.prefix_tokens = int(class_token)
        self.embed = embed
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if class_token else None
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)
        self.position = (
            PositionEmbedding(grid, dim, self.prefix_tokens)
            if position == "learned"
            else ConvPosition(dim, self.prefix_tokens)
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
    """The pyramid: four stages of strides 4, 8, 16 and 32, the last with a class token.

    Args:
        img_size: Side, or (height, width), that position embeddings are learned for. Images of
            any other size are taken too: the embeddings are resized.
        in_chans: Channels of an image.
        num_classes: Width of the logits; 0 for no head.
        global_pool: What logits are made of: `token`, the class token; `avg`, the average of all
            others; '' for all tokens as they are.
        embed_dims, depths: Width and number of blocks of each stage.
        num_heads: Heads of each stage; of width 32 if not given.
        ratios: Side of the window of tokens that becomes one landmark, in each stage.
        num_landmarks: In place of ratios: this many landmarks (a square number such as 49) in
            every stage and at every size, so that cost stays linear in the number of pixels.
        attention: Of all stages, a name of `softmaxfree.layers.registry`: `soft`, `softpp`,
            `softmax`, `linformer`, `spatial_reduction`, `performer`, `nystromformer`, `reformer`,
            `skyformer`, `gaussian`, or one that was registered.
        attention_options: Options of that attention alone, such as `{"features": 64}`; what the
            model has an argument for is refused.
        stage4: The last stage's: `soft` for the same as in the others, `softmax`, `gaussian`.
        tie_qk: Queries and keys share a projection; if not given, as the attention has it.
        sampler: How landmarks are made: `conv`, `avg`, `random` or `biased`.
        inverse, iters, ridge: How the landmark matrix is inverted, see `softmaxfree.pinv`.
        pad: `replicate` or `drop`, what becomes of sides that a ratio does not divide.
        value_conv: Sizes (odd) of the convolutions of the values, one of each stage or one for
            all; 0 for none.
        overlap: Patch embeddings by overlapping convolutions; if not, PVT's.
        pre_norm: Normalise the input of each branch in all stages, as PVT does; if not, in the
            last one only, and residual sums in the others.
        position: What tells tokens their places: `learned` embeddings, or a convolution (`conv`).
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
        ratios: Sequence[int] = (8, 4, 2, 1),
        num_landmarks: int | None = None,
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
        position: str = "learned",
        stem_stride: int = 4,
        mlp_ratios: float | Sequence[float] = 4.0,
        act_layer: str = "gelu",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        embed_dims = _four("embed_dims", embed_dims)
        depths = _four("depths", depths)
        num_heads = _four("num_heads", num_heads or [max(dim // 32, 1) for dim in embed_dims])
        ratios, mlp_ratios = _four("ratios", ratios), _four("mlp_ratios", mlp_ratios, 0)
        value_conv = _four("value_conv", value_conv, 0)
        if stage4 not in STAGE4:
            raise UserError(f"stage4 must be one of {', '.join(STAGE4)}, got {stage4!r}")
        if position not in POSITIONS:
            raise UserError(f"position must be one of {', '.join(POSITIONS)}, got {position!r}")
        if act_layer not in ACTIVATIONS:
            raise UserError(f"act_layer must be one of {', '.join(ACTIVATIONS)}, got {act_layer!r}")
        if stem_stride not in (2, 4):
            raise UserError(f"stem_stride must be 4 or 2, got {stem_stride}")
        options = all_options(
            attention, attention_options, {"ratio": "ratios", "value_conv": "value_conv"},
            tie_qk=tie_qk, sampler=sampler, num_landmarks=num_landmarks, inverse=inverse,
            iters=iters, ridge=ridge, pad=pad,
        )  # fmt: skip

        with torch.device(device or torch.get_default_device()):
            super().__init__(in_chans)
            self.num_stages = 4
            self.feature_info = []
            self.stages = nn.ModuleList()
            rates = iter(spread_drop_path(drop_path_rate, sum(depths)))
            grid, reduction = pair(img_size, "img_size"), 1
            for i, dim in enumerate(embed_dims):
                strides = [2] if i else [2, 1, stem_stride // 2]
                for stride in strides:
                    grid = (ceil_div(grid[0], stride), ceil_div(grid[1], stride))
                    reduction *= stride
                last = i == 3
                act = nn.GELU if last else ACTIVATIONS[act_layer]
                options["ratio"] = (
                    ratios[i] if num_landmarks is None else window_ratio(min(grid), num_landmarks)
                )
                blocks: list[nn.Module] = []
                for _ in range(depths[i]):
                    layer = build_attention(
                        stage4 if last and stage4 != "soft" else attention,
                        dim,
                        num_heads[i],
                        value_conv=value_conv[i] or None,
                        prefix_tokens=int(last),
                        max_size=grid,
                        **options,
                    )
                    kind, eps = (PreNormBlock, 1e-6) if last or pre_norm else (PostNormBlock, 1e-5)
                    blocks.append(kind(layer, dim, mlp_ratios[i], act, next(rates), eps))
                embedding = conv_embedding if overlap else patch_embedding
                embed = embedding(embed_dims[i - 1] if i else in_chans, dim, strides)
                self.stages.append(Stage(embed, dim, grid, blocks, last, position))
                self.feature_info.append(
                    {"num_chs": dim, "reduction": reduction, "module": f"stages.{i}"}
                )
            self.add_head(embed_dims[3], num_classes, global_pool, drop_rate)
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
        """The stages' maps, and the last one's tokens.

        Args:
            x: (B, in_chans, H, W) images.
            indices: Which stages: the last so many if a number, all if None.
            norm: Apply the final normalisation to the last stage's map; the others have none.
            stop_early: Compute no stage beyond the last that is asked for.
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
        """Drops the stages beyond the last that is asked for; returns the indices asked for."""
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
        """Which layer a parameter belongs to, for rates of learning that fall with depth."""
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


def _four(name: str, values: Any, least: float = 1) -> tuple[Any, ...]:
    """One value of each stage; one for all if a number is given."""
    four = (values,) * 4 if isinstance(values, int | float) else tuple(values)
    if len(four) != 4 or min(four) < least:
        raise UserError(f"{name} must be 4 numbers, {least} or more, got {values!r}")
    return four


def all_options(
    attention: str,
    alone: Mapping[str, Any] | None,
    per_layer: Mapping[str, str],
    **arguments: Any,
) -> dict[str, Any]:
    """What all layers of an attention are built with; refuses what would be set twice.

    Args:
        attention: Its name.
        alone: The model's `attention_options`.
        per_layer: Options that differ from layer to layer, and the model's arguments for them.
        arguments: The model's arguments that are options of the attention, None if not given.
    """
    alone = alone or {}
    check_own_options(attention, alone)
    names = {option: option for option in arguments} | dict(per_layer)
    for option in alone:
        if option in names:
            raise UserError(
                f"{option} in attention_options is set by an argument of the model; "
                f"pass {names[option]} there"
            )
    return chosen_options(attention, **arguments, **alone)


def check_own_options(attention: str, options: Iterable[str]) -> None:
    """Refuses options that the model, or the attention's name, settles."""
    for option in options:
        if option in FROM_MODEL:
            raise UserError(f"{option} follows from the model; leave it out")
        if option == "normalize" and attention in ("soft", "softpp"):
            raise UserError(
                f"normalize is what tells softpp from soft, and attention is {attention!r}; "
                "choose by the name"
            )


def window_ratio(side: int, num_landmarks: int) -> int:
    """The window that makes as many landmarks as asked for, or some more, to be pooled."""
    return max(1, int(side // max(num_landmarks, 1) ** 0.5))


def _create(variant: str, pretrained: bool, **kwargs: Any) -> SoftmaxFreeTransformer:
    """`soft_tiny` and the like: an attention and a size."""
    attention, size = variant.split("_", 1)
    arguments = PREFIXES[attention] | FAMILY[size] | kwargs
    if size.endswith("_fudan"):
        arguments = _as_released(arguments["attention"]) | arguments
    return build_model_with_cfg(
        SoftmaxFreeTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2, 3), "feature_cls": "getter"},
        **arguments,
    )


def _as_released(attention: str) -> dict[str, Any]:
    """Softmax in stage 4, tanh-GELU, and the inverse that the weights were trained with."""
    arguments = {"stage4": "softmax", "act_layer": "gelu_tanh"}
    inverses = {"soft": "damped", "softpp": "backtrack"}
    if attention in inverses:
        arguments |= {"inverse": inverses[attention], "pad": "drop"}
    return arguments


PREFIXES: dict[str, dict[str, Any]] = {
    "soft": {"attention": "soft"},
    "softpp": {"attention": "softpp"},
    "softx": {
        "attention": "softpp",
        "attention_options": {
            "gate": True,
            "value_conv_per_channel": True,
            "landmark_norm": False,
        },
        "num_landmarks": 36,
        "mlp_ratios": 3.0,
    },
}
"""Arguments of every attention: the paper's two, and what learns faster at equal cost."""

FAMILY: dict[str, dict[str, Any]] = {
    "nano": {
        "img_size": 32,
        "stem_stride": 2,
        "embed_dims": (32, 64, 128, 160),
        "depths": (1, 1, 2, 1),
        "num_heads": (2, 4, 8, 10),
        "ratios": (4, 2, 1, 1),
        "value_conv": (5, 5, 3, 0),
    },
    "tiny": {"embed_dims": (64, 128, 320, 512), "depths": (2, 2, 5, 2)},
    "small": {"embed_dims": (96, 192, 384, 768), "depths": (2, 2, 5, 2)},
    "medium": {"embed_dims": (96, 192, 384, 768), "depths": (2, 2, 18, 2)},
    "large": {"embed_dims": (128, 256, 512, 1024), "depths": (2, 2, 18, 2)},
    "tiny_fudan": {"embed_dims": (64, 128, 320, 512), "depths": (1, 2, 3, 2)},
    "small_fudan": {"embed_dims": (64, 128, 320, 512), "depths": (1, 3, 20, 4)},
    "medium_fudan": {"embed_dims": (64, 128, 288, 512), "depths": (1, 3, 29, 5)},
    "large_fudan": {"embed_dims": (64, 128, 320, 512), "depths": (1, 3, 40, 5)},
    "huge_fudan": {"embed_dims": (64, 128, 352, 512), "depths": (1, 5, 49, 5)},
}
"""Arguments of every size: nano, the journal's table, the authors' release."""

PUBLISHED: dict[str, Path] = {
    path.stem: path
    for path in sorted((Path(__file__).parents[1] / "weights").glob("*.cifar10.safetensors"))
}
"""Names with weights, and their files; docs/weights.md has the cards and says what a wheel has."""

_SMALL_IMAGES = {"input_size": (3, 32, 32), "pool_size": (2, 2), "crop_pct": 1.0}
_CIFAR10: dict[str, Any] = {
    "num_classes": 10,
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.247, 0.2435, 0.2616),
    "label_names": (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    ),
}  # fmt: skip
default_cfgs = generate_default_cfgs(
    {
        name: default_cfg(**_SMALL_IMAGES, **_CIFAR10, file=str(path))
        for name, path in PUBLISHED.items()
    }
    | {  # the star makes it what a name without a tag means
        f"{attention}_{size}.untrained*": default_cfg(**(_SMALL_IMAGES if size == "nano" else {}))
        for attention in ("soft", "softpp")
        for size in FAMILY
    }
    | {"softx_nano.untrained*": default_cfg(**_SMALL_IMAGES)}
)


@register_model
def soft_nano(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Nano for images of 32 to 64 pixels."""
    return _create("soft_nano", pretrained, **kwargs)


@register_model
def soft_tiny(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Tiny of the journal's table."""
    return _create("soft_tiny", pretrained, **kwargs)


@register_model
def soft_small(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Small of the journal's table."""
    return _create("soft_small", pretrained, **kwargs)


@register_model
def soft_medium(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Medium of the journal's table."""
    return _create("soft_medium", pretrained, **kwargs)


@register_model
def soft_large(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Large of the journal's table."""
    return _create("soft_large", pretrained, **kwargs)


@register_model
def soft_tiny_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Tiny as the authors released it."""
    return _create("soft_tiny_fudan", pretrained, **kwargs)


@register_model
def soft_small_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Small as the authors released it."""
    return _create("soft_small_fudan", pretrained, **kwargs)


@register_model
def soft_medium_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Medium as the authors released it."""
    return _create("soft_medium_fudan", pretrained, **kwargs)


@register_model
def soft_large_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Large as the authors released it."""
    return _create("soft_large_fudan", pretrained, **kwargs)


@register_model
def soft_huge_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT-Huge as the authors released it."""
    return _create("soft_huge_fudan", pretrained, **kwargs)


@register_model
def softpp_nano(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Nano for images of 32 to 64 pixels."""
    return _create("softpp_nano", pretrained, **kwargs)


@register_model
def softx_nano(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Nano with a gate, value kernels by channel, 36 plain landmarks in each stage.

    At the cost of SOFT++-Nano it is 2.5 points more accurate after 400 steps on CIFAR-10
    (docs/reproduction.md), 0.3 after 28 epochs, and worse on images of other sizes
    (docs/weights.md).
    """
    return _create("softx_nano", pretrained, **kwargs)


@register_model
def softpp_tiny(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Tiny of the journal's table."""
    return _create("softpp_tiny", pretrained, **kwargs)


@register_model
def softpp_small(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Small of the journal's table."""
    return _create("softpp_small", pretrained, **kwargs)


@register_model
def softpp_medium(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Medium of the journal's table."""
    return _create("softpp_medium", pretrained, **kwargs)


@register_model
def softpp_large(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Large of the journal's table."""
    return _create("softpp_large", pretrained, **kwargs)


@register_model
def softpp_tiny_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Tiny as the authors released it."""
    return _create("softpp_tiny_fudan", pretrained, **kwargs)


@register_model
def softpp_small_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Small as the authors released it."""
    return _create("softpp_small_fudan", pretrained, **kwargs)


@register_model
def softpp_medium_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Medium as the authors released it."""
    return _create("softpp_medium_fudan", pretrained, **kwargs)


@register_model
def softpp_large_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Large as the authors released it."""
    return _create("softpp_large_fudan", pretrained, **kwargs)


@register_model
def softpp_huge_fudan(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
    """SOFT++-Huge as the authors released it."""
    return _create("softpp_huge_fudan", pretrained, **kwargs)
