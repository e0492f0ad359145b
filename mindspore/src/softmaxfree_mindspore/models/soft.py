"""SOFT and SOFT++: a pyramid of four stages with softmax-free attention.

Lu, Zhang, Zhu, Feng, Xiang, Zhang: Softmax-free Linear Transformers, IJCV 2024.

Two families carry the name. The journal's table has the softmax-free attention in all stages
(`soft_tiny` to `softpp_large`); the authors' released code has softmax in the last one
(`soft_tiny_fudan` to `softpp_huge_fudan`), and only for it are there checkpoints.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from ..layers.attention import ATTENTIONS, NUM_LANDMARKS, dense, layer_norm
from ..layers.blocks import ACTIVATIONS, PostNormBlock, PreNormBlock
from ..layers.patches import conv_embedding
from ..layers.samplers import Size
from .checkpoints import load_weights
from .position import PositionEmbedding

STAGE4 = ("soft", "softmax", "gaussian")
OF_ALL = ("qkv_bias", "value_conv_per_channel", "gate")
"""Options that every attention has, stage 4's softmax too."""
OPTIONS = (*OF_ALL, "middle", "rows", "key_weights", "landmarks_of", "landmark_norm")
"""What `attention_options` may have."""
SIDES = {4: (56, 28, 14, 7), 2: (16, 8, 4, 2)}
"""Strides of the stem, and tokens along a side of each stage at the image size it is for: 224
pixels, or 32."""
POOLS = ("token", "avg", "")
"""How tokens become one: the class token, the average of the others, not at all."""


class Stage(nn.Cell):
    """A patch embedding, positions, blocks; in the last stage a class token, if there is one."""

    def __init__(
        self, embed: nn.Cell, dim: int, grid: Size, blocks: list[nn.Cell], class_token: bool
    ) -> None:
        super().__init__()
        self.prefix_tokens = int(class_token)
        self.embed = embed
        self.cls_token = Parameter(initializer(Normal(0.02), (1, 1, dim))) if class_token else None
        self.position = PositionEmbedding(grid, dim, self.prefix_tokens)
        self.blocks = nn.CellList(blocks)

    def construct(self, x: Tensor) -> tuple[Tensor, Size]:
        """A map (B, C, H, W) -> tokens (B, prefix + N, dim) and their grid."""
        x = self.embed(x)
        b, dim, height, width = x.shape
        size = (height, width)
        x = x.reshape(b, dim, height * width).swapaxes(1, 2)
        if self.cls_token is not None:
            x = ops.cat((self.cls_token.astype(x.dtype).broadcast_to((b, 1, dim)), x), 1)
        x = self.position(x, size)
        for block in self.blocks:
            x = block(x, size)
        return x, size

    def to_map(self, x: Tensor, size: Size) -> Tensor:
        """Tokens (B, prefix + N, dim) -> a map (B, dim, H, W)."""
        b, _, dim = x.shape
        return x[:, self.prefix_tokens :].swapaxes(1, 2).reshape(b, dim, size[0], size[1])


class SoftmaxFreeTransformer(nn.Cell):
    """The pyramid: four stages of strides 4, 8, 16 and 32.

    Args:
        img_size: Side, or (height, width), that position embeddings are learned for. Images of
            any other size are taken too: the embeddings are resized.
        in_chans: Channels of an image.
        num_classes: Width of the logits; 0 for no head.
        global_pool: What logits are made of: `token`, the class token; `avg`, the average of all
            others; '' for all tokens as they are.
        embed_dims, depths: Width and number of blocks of each stage.
        num_heads: Heads of each stage; of width 32 if not given.
        num_landmarks: Landmarks (a square number) in every stage and at every size, so that cost is
            linear in the number of pixels: 49 by default.
        ratios: In place of `num_landmarks`: side of the window of tokens that becomes one landmark,
            in each stage, so that their number grows with the image. With both, landmarks are
            averages over what the windows give.
        attention: `soft`, `softpp` or `softx`.
        attention_options: Options of that attention which are not arguments of the model, such as
            `{"gate": True}`.
        stage4: The last stage's: `soft` for the same as in the others, `softmax`, `gaussian`.
        sampler: How landmarks are made: `conv`, `avg`, `random` or `biased`.
        inverse, iters, ridge: How the landmark matrix is inverted, see `pinv`.
        pad: `replicate` or `drop`, what becomes of sides that a ratio does not divide.
        value_conv: Sizes (odd) of the convolutions of the values, one of each stage or one for
            all; 0 for none.
        class_token: Whether the last stage has a token beside those of the image.
        stem_stride: Stride of the first patch embedding: 4, or 2 for small images.
        mlp_ratios: Width of the hidden layers, in units of the stage's.
        act_layer: Activation in the first three stages: `gelu`, or `gelu_tanh` as released.
        drop_rate, drop_path_rate: Rates of dropout before the head and of stochastic depth.
    """

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
        sampler: str | None = None,
        inverse: str | None = None,
        iters: int | None = None,
        ridge: float | None = None,
        pad: str | None = None,
        value_conv: int | Sequence[int] = (9, 5, 3, 0),
        class_token: bool = True,
        stem_stride: int = 4,
        mlp_ratios: float | Sequence[float] = 4.0,
        act_layer: str = "gelu",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        embed_dims, depths = _four("embed_dims", embed_dims), _four("depths", depths)
        num_heads = _four("num_heads", num_heads or [max(dim // 32, 1) for dim in embed_dims])
        mlp_ratios = _four("mlp_ratios", mlp_ratios, 0)
        value_conv = _four("value_conv", value_conv, 0)
        _one_of("attention", attention, ("soft", "softpp", "softx"))
        for option in attention_options or {}:
            _one_of("an option of attention_options", option, OPTIONS)
        _one_of("stage4", stage4, STAGE4)
        _one_of("act_layer", act_layer, ACTIVATIONS)
        _one_of("global_pool", global_pool, POOLS)
        _one_of("stem_stride", stem_stride, (4, 2))
        if global_pool == "token" and not class_token:
            raise ValueError("global_pool='token' needs a class token, and the model has none")
        if ratios is None:
            num_landmarks = NUM_LANDMARKS if num_landmarks is None else num_landmarks
            ratios = [window_ratio(side, num_landmarks) for side in SIDES[stem_stride]]
        ratios = _four("ratios", ratios)
        arguments = {
            "sampler": sampler, "num_landmarks": num_landmarks, "inverse": inverse,
            "iters": iters, "ridge": ridge, "pad": pad,
        }  # fmt: skip
        options = {name: value for name, value in arguments.items() if value is not None}
        options |= attention_options or {}
        of_all = {name: value for name, value in options.items() if name in OF_ALL}

        self.in_chans, self.global_pool = in_chans, global_pool
        rates = iter(_spread_drop_path(drop_path_rate, sum(depths)))
        grid, stages = _pair(img_size), []
        for i, dim in enumerate(embed_dims):
            strides = [2] if i else [2, 1, stem_stride // 2]
            for stride in strides:
                grid = (-(-grid[0] // stride), -(-grid[1] // stride))
            last = i == 3
            exact, prefix = last and stage4 != "soft", int(last and class_token)
            name, own = (stage4, of_all) if exact else (attention, {"ratio": ratios[i], **options})
            kind, eps, act = (
                (PreNormBlock, 1e-6, "gelu") if last else (PostNormBlock, 1e-5, act_layer)
            )
            blocks = []
            for _ in range(depths[i]):
                layer = ATTENTIONS[name](
                    dim,
                    num_heads[i],
                    value_conv=value_conv[i] or None,
                    prefix_tokens=prefix,
                    **own,
                )
                blocks.append(kind(layer, dim, mlp_ratios[i], act, next(rates), eps))
            embed = conv_embedding(embed_dims[i - 1] if i else in_chans, dim, strides)
            stages.append(Stage(embed, dim, grid, blocks, class_token=prefix > 0))
        self.stages = nn.CellList(stages)
        self.norm = layer_norm(embed_dims[3], 1e-6)
        self.head_drop = nn.Dropout(p=drop_rate)
        self.head = dense(embed_dims[3], num_classes) if num_classes else nn.Identity()

    def forward_maps(self, x: Tensor) -> tuple[Tensor, ...]:
        """Images (B, in_chans, H, W) -> the stages' maps (B, dim, H / stride, W / stride)."""
        self._check(x)
        maps = ()
        for stage in self.stages:
            tokens, size = stage(x)
            x = stage.to_map(tokens, size)
            maps = (*maps, x)
        return maps

    def forward_tokens(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> tokens (B, prefix + N, dim) of the last stage."""
        self._check(x)
        for stage in self.stages[:-1]:
            tokens, size = stage(x)
            x = stage.to_map(tokens, size)
        return self.stages[-1](x)[0]

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> normalised tokens (B, prefix + N, dim)."""
        return self.norm(self.forward_tokens(x))

    def construct(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> logits (B, num_classes)."""
        x = self.forward_features(x)
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, self.stages[-1].prefix_tokens :].mean(1)
        return self.head(self.head_drop(x))

    def _check(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self.in_chans:
            raise ValueError(f"images must be (B, {self.in_chans}, H, W), got shape {x.shape}")


def create_model(
    name: str, checkpoint_path: str | Path | None = None, **arguments: Any
) -> SoftmaxFreeTransformer:
    """A model of the family, in evaluation mode.

    Args:
        name: Such as `softpp_tiny` or `soft_tiny_fudan`, see `list_models`.
        checkpoint_path: .safetensors file of softmaxfree's, see `load_weights`.
        arguments: Of `SoftmaxFreeTransformer`, in place of the name's.
    """
    if name not in list_models():
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(list_models())}")
    design, size = name.split("_", 1)
    nano = NANO_SOFTX if name == "softx_nano" else {}
    known = _merged(SIZES[size], DESIGNS[design], nano, arguments)
    if size.endswith("_fudan"):
        known = _merged(_as_released(known["attention"]), known)
    model = SoftmaxFreeTransformer(**known)
    if checkpoint_path is not None:
        load_weights(model, checkpoint_path)
    return model.set_train(False)


def list_models() -> list[str]:
    """Names that `create_model` takes."""
    return [
        f"{design}_{size}"
        for design in DESIGNS
        for size in SIZES
        if design != "softx" or not size.endswith("_fudan")
    ]


def _merged(*tables: dict[str, Any]) -> dict[str, Any]:
    """All arguments, the last table's first; `ratios` and `num_landmarks` replace each other."""
    merged: dict[str, Any] = {}
    for table in tables:
        if table.keys() & {"ratios", "num_landmarks"}:
            merged.pop("ratios", None)
            merged.pop("num_landmarks", None)
        merged |= table
    return merged


def _as_released(attention: str) -> dict[str, Any]:
    """Softmax in stage 4, tanh-GELU, and landmarks and inverse as the weights were trained."""
    arguments = {"stage4": "softmax", "act_layer": "gelu_tanh", "ratios": (8, 4, 2, 1)}
    inverses = {"soft": "damped", "softpp": "backtrack"}
    if attention in inverses:
        arguments |= {"inverse": inverses[attention], "pad": "drop"}
    return arguments


DESIGNS: dict[str, dict[str, Any]] = {
    "soft": {"attention": "soft"},
    "softpp": {"attention": "softpp"},
    "softx": {
        "attention": "softx",
        "attention_options": {"gate": True, "value_conv_per_channel": True},
        "global_pool": "avg",
        "class_token": False,
        "num_landmarks": 49,
        "mlp_ratios": 3.0,
    },
}
"""What the first word of a name stands for: the paper's two, and softx."""

NANO_SOFTX = {"num_landmarks": 16, "mlp_ratios": 3.25}
"""As many landmarks as `softpp_nano` has of 32 x 32 pixels, and its multiply-adds."""

SIZES: dict[str, dict[str, Any]] = {
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
"""What the rest of a name stands for: nano, the journal's table, the authors' release."""


def window_ratio(side: int, num_landmarks: int) -> int:
    """The largest window that makes at least so many landmarks of side x side tokens."""
    return max(1, int(side // max(num_landmarks, 1) ** 0.5))


def _four(name: str, values: Any, least: float = 1) -> tuple[Any, ...]:
    """One value of each stage; one for all if a number is given."""
    four = (values,) * 4 if isinstance(values, int | float) else tuple(values)
    if len(four) != 4 or min(four) < least:
        raise ValueError(f"{name} must be 4 numbers, {least} or more, got {values!r}")
    return four


def _one_of(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def _pair(value: int | Sequence[int]) -> Size:
    """(H, W) of an int, for both, or of two."""
    sides = (value, value) if isinstance(value, int) else tuple(value)
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError(f"img_size must be a side or (height, width), got {value!r}")
    return sides


def _spread_drop_path(rate: float, depth: int) -> list[float]:
    """Rates of stochastic depth, from 0 in the first block to `rate` in the last."""
    if not 0 <= rate < 1:
        raise ValueError(f"drop_path_rate must be at least 0 and below 1, got {rate}")
    return [rate * i / max(depth - 1, 1) for i in range(depth)]
