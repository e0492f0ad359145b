"""Where the attentions of a model of timm or torch are."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from timm.models import FeatureDictNet, FeatureHookNet
from timm.models._features import FeatureGetterNet
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer, SwinTransformerStage, WindowAttention
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Stage
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..errors import UserError
from ..ops.tracing import ceil_div
from .replaced_modules import (
    TOKEN_ATTENTIONS,
    WHOLE_MAP,
    Replaced,
    SequenceAttention,
    TiedProjection,
    TokenAttention,
)

_SWIN_STAGES = (SwinTransformerStage, SwinTransformerV2Stage)


def replaceable(model: nn.Module) -> bool:
    """Tells whether `replace_attention` and `tie_qk` take a model."""
    return _core(model) is not None


def _core(model: nn.Module) -> Any:
    """timm's model, the parts of a Swin that features are taken from, or a module with torch's
    attentions; None without one."""
    core: Any = model
    if isinstance(model, FeatureGetterNet):
        core = model.model
    elif isinstance(model, FeatureHookNet) and "body" in model:
        core = model["body"]
    if isinstance(core, VisionTransformer | Beit | Eva | SwinTransformer | SwinTransformerV2):
        return core
    if isinstance(core, FeatureDictNet | FeatureHookNet) and any(
        isinstance(part, _SWIN_STAGES) for part in core.children()
    ):
        return core
    return model if any(_torch_attentions(model)) else None


def backbone_of(model: nn.Module, caller: str) -> Any:
    core = _core(model)
    if core is None:
        alone = isinstance(model, nn.MultiheadAttention)
        raise UserError(
            f"{caller} is for timm's ViT, DeiT, BEiT, EVA, Swin and Swin V2, without other modules "
            f"around them, and for modules that hold nn.MultiheadAttention, got "
            f"{type(model).__name__}; "
            + ("pass nn.ModuleList([attention])" if alone else "pass such a model")
        )
    return core


def _torch_attentions(model: nn.Module) -> Iterator[tuple[nn.Module, str, bool]]:
    """Attentions of torch: the module that holds one, under which name, and whether it stays."""
    for holder in model.modules():
        for name, child in holder.named_children():
            if type(child) in (nn.MultiheadAttention, SequenceAttention):
                yield holder, name, isinstance(holder, nn.TransformerDecoderLayer)


def left_alone(core: nn.Module) -> tuple[str, ...]:
    """Attentions that are never replaced."""
    return union(
        [f"{name} of {type(holder).__name__} (causal)"]
        for holder, name, causal in _torch_attentions(core)
        if causal
    )


@dataclass(frozen=True)
class Place:
    """Where in the model an attention is."""

    holder: Any
    """The module that has it: a block, or a branch of a block with several."""
    grid: tuple[int, int] | None
    """Grid of the tokens, at the model's own input size; None for sequences of any length."""
    prefix: int = 0
    name: str = "attn"
    rotary: bool = False
    """Whether queries and keys are turned by their positions."""

    @property
    def attention(self) -> Any:
        return getattr(self.holder, self.name)

    @property
    def original(self) -> Any:
        """timm's or torch's own attention."""
        return self.attention.original if self.replaced else self.attention

    @property
    def replaced(self) -> bool:
        return isinstance(self.attention, Replaced)

    @property
    def tied(self) -> bool:
        """Whether the model's own attention has one projection for queries and keys."""
        attention = self.attention
        if self.replaced:
            return bool(attention.tied)
        return isinstance(getattr(attention, "qkv", None), TiedProjection)


def places_of(core: Any) -> list[Place]:
    if isinstance(core, VisionTransformer | Beit | Eva):
        return _token_places(core)
    if isinstance(core, SwinTransformer | SwinTransformerV2 | FeatureDictNet | FeatureHookNet):
        return _map_places(core)
    places = [
        Place(holder, None, name=name)
        for holder, name, causal in _torch_attentions(core)
        if not causal
    ]
    if not places:
        raise UserError(
            "the only attentions here are those of nn.TransformerDecoderLayer, which is causal; "
            "landmarks are made of all queries and would leak the future: keep softmax there"
        )
    if len({place.attention for place in places}) < len(places):
        raise UserError("modules share an nn.MultiheadAttention; give each a copy of its own")
    return places


def _token_places(core: Any) -> list[Place]:
    places = []
    for block in core.blocks:
        holders = [block] if hasattr(block, "attn") else getattr(block, "attns", [])
        if not holders or any(
            type(holder.attn) not in (*TOKEN_ATTENTIONS, TokenAttention) for holder in holders
        ):
            raise UserError(
                f"{type(block).__name__} has no attention of the usual kind (timm's "
                "Attention); build the model with block_fn=Block and attn_layer=Attention"
            )
        rotary = getattr(core, "rope", None) is not None
        grid = tuple(core.patch_embed.grid_size)
        places += [Place(holder, grid, core.num_prefix_tokens, rotary=rotary) for holder in holders]
    return places


def _map_places(core: Any) -> list[Place]:
    grid: tuple[int, int] = tuple(core.patch_embed.grid_size)
    places = []
    for stage in core.modules():
        if not isinstance(stage, _SWIN_STAGES):
            continue
        if not isinstance(stage.downsample, nn.Identity):
            grid = (ceil_div(grid[0], 2), ceil_div(grid[1], 2))  # patches are merged after padding
        for block in stage.blocks:
            own = type(block) in WHOLE_MAP and type(block.attn) in (
                WindowAttention,
                WindowAttentionV2,
            )
            if not own and type(block) not in WHOLE_MAP.values():
                raise UserError(
                    f"a block of this Swin is {type(block).__name__} with "
                    f"{type(block.attn).__name__}, expected timm's SwinTransformerBlock with "
                    "WindowAttention; pass a model of these"
                )
            places.append(Place(block, grid))
    return places


def union(lists: Iterable[list[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))
