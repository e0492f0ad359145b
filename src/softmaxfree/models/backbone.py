"""Base of the backbones: the head, positions, checks of images, loading of weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import trunc_normal_
from timm.models import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from ..errors import UserError
from ..layers.activations import TanhGELU
from ..layers.mlp import Mlp
from ..layers.multihead import MultiHeadAttention
from ..layers.patches import EmbeddingConv, PatchProjection
from ..ops.batching import is_wrapped
from ..ops.checks import shape
from ..ops.tracing import is_exporting
from .checkpoints import check_state_dict, checkpoint_filter_fn, resize_grid

POOLS = ("token", "avg", "")
"""How tokens become one: the class token, the average of the others, not at all."""

for module in (EmbeddingConv, Mlp, MultiHeadAttention, PatchProjection, TanhGELU):
    register_notrace_module(module)  # torch.fx cannot follow their checks


class Backbone(nn.Module, ABC):
    """Base of the backbones: `forward_features` gives tokens, `forward_head` their logits."""

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        if in_chans < 1:
            raise UserError(f"in_chans must be at least 1, got {in_chans}")
        self.in_chans = in_chans
        self.grad_checkpointing = False
        self.register_load_state_dict_pre_hook(_adapt_weights)

    def add_head(self, width: int, num_classes: int, global_pool: str, drop_rate: float) -> None:
        """Adds the last layers, then draws all weights."""
        self.num_features = self.head_hidden_size = width
        self.norm: nn.Module = nn.LayerNorm(width, 1e-6)
        self.head_drop = nn.Dropout(drop_rate)
        self._set_head(num_classes, global_pool)
        self.apply(init_weights)

    @abstractmethod
    def forward_tokens(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W), checked -> tokens (B, prefix + N, num_features)."""

    @property
    @abstractmethod
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the grid's."""

    def check(self, x: Tensor) -> Tensor:
        """Refuses bad images; returns them in the memory order that convolutions are fastest in."""
        return channels_last(check_images(x, self.in_chans))

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> normalised tokens (B, prefix + N, num_features)."""
        return self.norm(self.forward_tokens(self.check(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, prefix + N, num_features) -> logits (B, num_classes), or their input."""
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Computes blocks again in the backward pass: less memory, more time."""
        self.grad_checkpointing = enable

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads weights of any image size, under this package's names or the authors'."""
        state = checkpoint_filter_fn(state_dict, self)
        check_state_dict(state, self, strict)
        return super().load_state_dict(state, strict, assign)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Puts in a new, untrained head; none for 0 classes."""
        like = next(self.parameters())
        self._set_head(num_classes, self.global_pool if global_pool is None else global_pool)
        self.head.to(device=like.device, dtype=like.dtype).train(self.training)
        self.head.apply(init_weights)

    def _set_head(self, num_classes: int, global_pool: str) -> None:
        if global_pool not in POOLS:
            raise UserError(
                f"global_pool must be one of {', '.join(map(repr, POOLS))}, got {global_pool!r}"
            )
        if global_pool == "token" and not self.num_prefix_tokens:
            raise UserError("global_pool='token' needs a class token, and the model has none")
        if num_classes < 0:
            raise UserError(f"num_classes must be 0 or more, got {num_classes}")
        self.num_classes, self.global_pool = num_classes, global_pool
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()


def _adapt_weights(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames foreign weights before they are loaded, also into a model around this one."""
    keys = [key for key in state_dict if key.startswith(prefix)]
    own = {key.removeprefix(prefix): state_dict.pop(key) for key in keys}
    for key, tensor in checkpoint_filter_fn(own, module).items():
        state_dict[prefix + key] = tensor


@register_notrace_module
class PositionEmbedding(nn.Module):
    """Learned positions of a grid and of prefix tokens, resized bilinearly to other grids."""

    def __init__(self, size: tuple[int, int], dim: int, prefix_tokens: int) -> None:
        super().__init__()
        self.grid = nn.Parameter(torch.empty(1, *size, dim))
        self.prefix = nn.Parameter(torch.empty(1, prefix_tokens, dim)) if prefix_tokens else None
        for parameter in self.parameters():
            trunc_normal_(parameter, std=0.02)

    def forward(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """Tokens (B, prefix + H W, dim) of a grid (H, W), with their positions added."""
        height, width = size
        # An exported graph is for all sizes.
        grid = resize_grid(self.grid, height, width, always=is_exporting()).flatten(1, 2)
        return x + (grid if self.prefix is None else torch.cat([self.prefix, grid], 1))


@register_notrace_module
class ConvPosition(nn.Module):
    """Positions by a depthwise convolution, which zero padding makes differ near the margins.

    Chu et al., Conditional Positional Encodings for Vision Transformers, arXiv 2102.10882.
    """

    def __init__(self, dim: int, prefix_tokens: int) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """Tokens (B, prefix + H W, dim) of a grid (H, W), with what their neighbours add."""
        grid = x[:, self.prefix_tokens :].transpose(1, 2).unflatten(2, tuple(size))
        added = self.conv(grid).flatten(2).transpose(1, 2)
        return x + F.pad(added, (0, 0, self.prefix_tokens, 0))


def to_tokens(x: Tensor, cls_token: Tensor | None) -> tuple[Tensor, Sequence[int]]:
    """A map (B, dim, H, W) -> tokens (B, prefix + H W, dim), the class token first, and (H, W)."""
    size = x.shape[-2:]
    x = x.flatten(2).transpose(1, 2)
    if cls_token is not None:
        x = torch.cat([cls_token.expand(x.shape[0], -1, -1), x], 1)
    return x, size


@register_notrace_function
def check_images(x: Tensor, in_chans: int) -> Tensor:
    """Refuses what is not a batch of images; returns the images."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        got = f"shape {shape(x)}" if isinstance(x, Tensor) else type(x).__name__
        raise UserError(f"images must be (B, {in_chans}, H, W), got {got}")
    if x.shape[1] != in_chans:
        raise UserError(
            f"images must have {in_chans} channels, got shape {shape(x)}; "
            f"build the model with in_chans={x.shape[1]} for these"
        )
    if not x.is_floating_point():
        raise UserError(f"images must have a floating-point type, got {x.dtype}; normalise them")
    if x.numel() == 0:
        raise UserError(f"images are empty: their shape is {shape(x)}")
    return x


@register_notrace_function
def channels_last(x: Tensor) -> Tensor:
    """Puts channels side by side in memory; not in `torch.func.vmap`, which has no such order."""
    if not torch.compiler.is_compiling() and is_wrapped(x):
        return x
    return x.contiguous(memory_format=torch.channels_last)


def pair(value: int | Sequence[int], name: str) -> tuple[int, int]:
    """(H, W) from one side or two."""
    sides = (value, value) if isinstance(value, int) else tuple(value)
    if len(sides) != 2 or min(sides) < 1:
        raise UserError(f"{name} must be a side or (height, width), got {value!r}")
    return sides[0], sides[1]


def spread_drop_path(rate: float, depth: int) -> list[float]:
    """Rates of stochastic depth, from 0 in the first block to `rate` in the last."""
    if not 0 <= rate < 1:
        raise UserError(f"drop_path_rate must be at least 0 and below 1, got {rate}")
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


def init_weights(module: nn.Module) -> None:
    """Draws the weights of a linear layer or a convolution; leaves others as they are."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def default_cfg(**changes: Any) -> dict[str, Any]:
    """How images are prepared for a model, and the names of its first and its last layer."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stages.0.embed.0.conv",
        "classifier": "head",
        "paper_ids": "arXiv:2207.03341",
        "paper_name": "Softmax-free Linear Transformers",
        **changes,
    }
