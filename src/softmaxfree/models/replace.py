"""Another attention in timm's ViT, DeiT and Swin: put in, and taken out again."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from timm.models import FeatureDictNet, FeatureHookNet
from timm.models._features import FeatureGetterNet
from timm.models.swin_transformer import (
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
    WindowAttention,
)
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import nn

from ..errors import UserError
from ..layers.attention import NUM_LANDMARKS
from ..layers.multihead import MultiHeadAttention
from ..layers.registry import attention_options, build_attention, chosen_options
from ..ops.tracing import ceil_div
from .options import check_own_options, window_ratio
from .projections import (
    PROJECTIONS,
    check_projections,
    join_projections,
    projections_of,
    split_projections,
)
from .replaced_modules import (
    Keys,
    MapAttention,
    Replaced,
    TiedProjection,
    TokenAttention,
    WholeMapBlock,
    image_grid,
    remove_grid,
)
from .replacement_report import Replacement, measure_model

ORIGINAL = "original"
"""The name of timm's own attention."""

_COPIED = "k (a copy of q)"
_EXTRAS = {"q_norm": "qk_norm", "k_norm": "qk_norm", "norm": "scale_attn_norm", "gate": "gated"}
"""Parts that timm's attention may have, and the arguments that ask for them."""


def replace_attention(
    model: nn.Module, name: str, *, measure: bool = True, **options: Any
) -> Replacement:
    """Replaces the attention of a timm ViT, DeiT or Swin in place, or puts the original back.

        report = replace_attention(model, "softpp", num_landmarks=49)
        print(report)
        replace_attention(model, "original")  # the model as it came

    The projections of queries, keys, values and results are kept; other weights of the new
    attention are drawn at random and have to be trained. In a Swin the new attention sees the whole
    map, without windows and shifts. Build optimisers anew: they hold the old parameters.

    Weights that the new attention cannot hold are set aside for the way back: the projection of
    keys, if it is tied to that of queries, and a Swin's bias of relative positions. They are not in
    the model's `state_dict`. If the queries have changed since, the keys come back as a copy of
    them; the bias comes back unchanged.

    Args:
        model: A `VisionTransformer` (also distilled) or `SwinTransformer` of timm, or what
            `features_only=True` makes of one.
        name: A name of `softmaxfree.layers.registry`, or `original` for timm's own attention.
        measure: Measure multiply-adds and memory before and after, which takes some forward passes
            of the model at its own input size.
        options: Options of the attention, such as `num_landmarks`, `ratio` or `value_conv`. An
            attention with landmarks has 49 if neither of the first two is given.
    """
    core = _backbone(model, "replace_attention")
    places = _places(core)
    if name == ORIGINAL:
        if options:
            raise UserError(
                f"the original attention has no options; leave out {', '.join(options)}"
            )
        changes = [_restored(place) for place in places if place.replaced]
    else:
        options = _chosen(name, options)
        if getattr(getattr(core, "patch_drop", None), "prob", 0):
            raise UserError(
                "a model that drops patches has no grid of tokens; build it with patch_drop_rate=0"
            )
        changes = [_built(name, place, options) for place in places]
    before = measure_model(model, core, measure)
    for change in changes:
        _commit(core, change)
    if name == ORIGINAL:
        remove_grid(core)
    return Replacement(
        name,
        len(changes),
        before,
        measure_model(model, core, measure),
        _union(change.kept for change in changes),
        _union(change.new for change in changes),
        _union(change.dropped for change in changes),
    )


def tie_qk(model: nn.Module) -> nn.Module:
    """Makes queries the keys in a timm ViT, DeiT or Swin, in place; returns the model.

    Every attention loses its projection of keys and becomes softmax attention with a symmetric
    kernel, as in the paper's ablation.

    Args:
        model: A model that `replace_attention` takes, with timm's own attention.
    """
    places = _places(_backbone(model, "tie_qk"))
    for place in places:
        if place.replaced:
            raise UserError(
                "tie_qk is for timm's own attention, and this model's is replaced; pass "
                "tie_qk=True to replace_attention, or put the original back first"
            )
        if isinstance(place.attention.qkv, TiedProjection):
            raise UserError("queries and keys of this model are tied already; leave tie_qk out")
        _refuse_extras(place.attention, ("q_norm", "k_norm"))
        check_projections(place.attention)
    for place in places:
        qkv = place.attention.qkv
        q, _, v = split_projections(qkv)
        place.attention.qkv = TiedProjection(q, v).train(qkv.training)
    return model


def replaceable(model: nn.Module) -> bool:
    """Tells whether `replace_attention` and `tie_qk` take a model."""
    return _core(model) is not None


def _core(model: nn.Module) -> Any:
    """The ViT, the Swin, or the parts of a Swin that features are taken from; None without one."""
    core: Any = model
    if isinstance(model, FeatureGetterNet):
        core = model.model
    elif isinstance(model, FeatureHookNet) and "body" in model:
        core = model["body"]
    if isinstance(core, VisionTransformer | SwinTransformer):
        return core
    if isinstance(core, FeatureDictNet | FeatureHookNet) and any(
        isinstance(part, SwinTransformerStage) for part in core.children()
    ):
        return core
    return None


def _backbone(model: nn.Module, caller: str) -> Any:
    core = _core(model)
    if core is None:
        raise UserError(
            f"{caller} is for timm's VisionTransformer (ViT, DeiT) and SwinTransformer, got "
            f"{type(model).__name__}; pass such a model, without other modules around it"
        )
    return core


@dataclass(frozen=True)
class _Place:
    """Where in the model an attention is."""

    holder: Any
    """The module that has it as `attn`: a block, or a branch of a block with several."""
    grid: tuple[int, int]
    """Grid of the tokens, at the model's own input size."""
    prefix: int

    @property
    def attention(self) -> Any:
        return self.holder.attn

    @property
    def replaced(self) -> bool:
        return isinstance(self.attention, Replaced)

    @property
    def tied(self) -> bool:
        """Whether timm's own attention has one projection for queries and keys."""
        attention = self.attention
        return attention.tied if self.replaced else isinstance(attention.qkv, TiedProjection)


def _places(core: Any) -> list[_Place]:
    grid: tuple[int, int] = tuple(core.patch_embed.grid_size)
    places = []
    if isinstance(core, VisionTransformer):
        for block in core.blocks:
            holders = [block] if hasattr(block, "attn") else getattr(block, "attns", [])
            if not holders or any(
                type(holder.attn) not in (Attention, TokenAttention) for holder in holders
            ):
                raise UserError(
                    f"{type(block).__name__} has no attention of the usual kind (timm's "
                    "Attention); build the model with block_fn=Block and attn_layer=Attention"
                )
            places += [_Place(holder, grid, core.num_prefix_tokens) for holder in holders]
        return places
    for stage in core.modules():
        if not isinstance(stage, SwinTransformerStage):
            continue
        if not isinstance(stage.downsample, nn.Identity):
            grid = (ceil_div(grid[0], 2), ceil_div(grid[1], 2))  # patches are merged after padding
        for block in stage.blocks:
            if (type(block), type(block.attn)) not in (
                (SwinTransformerBlock, WindowAttention),
                (WholeMapBlock, MapAttention),
            ):
                raise UserError(
                    f"a block of this Swin is {type(block).__name__} with "
                    f"{type(block.attn).__name__}, expected timm's SwinTransformerBlock with "
                    "WindowAttention; pass a model of these"
                )
            places.append(_Place(block, grid, 0))
    return places


@dataclass(frozen=True)
class _Change:
    """A change to make at a place: another attention, or timm's own if `layer` is None."""

    place: _Place
    layer: MultiHeadAttention | None
    keys: Keys | None
    """The projection of keys that the layer cannot hold."""
    kept: list[str]
    new: list[str]
    dropped: list[str]


def _chosen(name: str, options: dict[str, Any]) -> dict[str, Any]:
    check_own_options(name, options)
    if "qkv_bias" in options:
        raise UserError("qkv_bias follows from the model's weights; leave it out")
    chosen = chosen_options(name, **options)
    if not {"num_landmarks", "ratio"} & set(chosen) and "num_landmarks" in attention_options(name):
        chosen["num_landmarks"] = NUM_LANDMARKS
    return chosen


def _built(name: str, place: _Place, options: dict[str, Any]) -> _Change:
    """Builds the attention of that name with the weights that it can take over."""
    had = projections_of(place.attention)
    old = place.attention.layer if place.replaced else place.attention
    if not place.replaced:
        _refuse_extras(old, tuple(_EXTRAS))
    defaults: dict[str, Any] = {}
    if "num_landmarks" in options:
        defaults["ratio"] = window_ratio(min(place.grid), options["num_landmarks"])
    if place.tied:
        defaults["tie_qk"] = True
    layer = build_attention(
        name,
        had.q.in_features,
        old.num_heads,
        max_size=place.grid,
        prefix_tokens=place.prefix,
        qkv_bias=had.q.bias is not None,
        **(defaults | options),
    )
    weight = had.q.weight
    layer.to(device=weight.device, dtype=weight.dtype).train(place.attention.training)

    kept = {}
    for part in PROJECTIONS:
        own, given = getattr(layer, part), getattr(had, part)
        if own is None:  # queries are keys
            continue
        if not isinstance(own, nn.Linear) or own.weight.shape != had.q.weight.shape:
            raise UserError(
                f"attention {name!r} has {part} of its own kind, where a linear layer of "
                f"{tuple(had.q.weight.shape)} can be replaced; leave q, k, v and proj as "
                "MultiHeadAttention makes them"
            )
        kept[part] = part if given is not None else _COPIED
        setattr(layer, part, deepcopy(had.q) if given is None else given)
    if type(old) is type(layer):
        kept |= _copy_same(old, layer)
    keys = None
    if layer.k is None and had.k is not None and not place.tied:
        keys = Keys(deepcopy(had.q), had.k)
    return _Change(
        place,
        layer,
        keys,
        list(kept.values()),
        [part for part in _parts(layer) if part not in kept],
        [part for part in _had_parts(place) if part not in kept],
    )


def _copy_same(old: nn.Module, layer: nn.Module) -> dict[str, str]:
    """Copies weights that both layers have, but for projections; returns their names."""
    copied = {}
    source = dict([*old.named_parameters(), *old.named_buffers()])
    for name, target in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.split(".")[0] in PROJECTIONS:
            continue
        if name in source and source[name].shape == target.shape:
            with torch.no_grad():
                target.copy_(source[name])
            if isinstance(target, nn.Parameter):
                target.requires_grad_(source[name].requires_grad)
                copied[name] = name
    return copied


def _restored(place: _Place) -> _Change:
    """Plans to put timm's own attention back with the weights that it can take over."""
    parts = _parts(place.attention.layer)
    kept = [part for part in parts if part in PROJECTIONS]
    if "k" not in parts and not place.tied:
        kept.append("k" if projections_of(place.attention).k is not None else _COPIED)
    kept += [name for name, _ in place.attention.original.named_parameters()]
    return _Change(place, None, None, kept, [], [part for part in parts if part not in kept])


def _commit(core: Any, change: _Change) -> None:
    """Makes a change."""
    holder, attention, layer = change.place.holder, change.place.attention, change.layer
    if layer is None:
        holder.attn = _put_back(attention)
        if isinstance(holder, WholeMapBlock):
            holder.__class__ = SwinTransformerBlock
    elif isinstance(attention, Replaced):
        attention.layer, attention.keys = layer, change.keys
    else:
        tied = isinstance(attention.qkv, TiedProjection)
        # Not deleted: weights keep their order for when they are back.
        attention.qkv, attention.proj = nn.Identity(), nn.Identity()
        if isinstance(holder, SwinTransformerBlock):
            holder.attn = MapAttention(layer, attention, tied, change.keys)
            holder.__class__ = WholeMapBlock
        else:
            holder.attn = TokenAttention(layer, attention, tied, change.keys, image_grid(core))


def _put_back(attention: Replaced) -> nn.Module:
    """timm's own module, with the weights as they are now."""
    had, original = projections_of(attention), attention.original
    if had.k is None and attention.tied:
        original.qkv = TiedProjection(had.q, had.v)
    else:
        original.qkv = join_projections(had.q, had.q if had.k is None else had.k, had.v)
    original.proj = had.proj
    weight = had.q.weight
    return original.to(device=weight.device, dtype=weight.dtype).train(attention.training)


def _refuse_extras(attention: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(getattr(attention, name, None), nn.Identity | None):
            raise UserError(
                f"the model's attention has {name}, which has no place in another; build the "
                f"model without {_EXTRAS[name]}"
            )


def _parts(layer: MultiHeadAttention) -> list[str]:
    """Names of a layer's weights; a projection counts as one."""
    names: dict[str, None] = {}
    for name, _ in layer.named_parameters():
        first = name.split(".")[0]
        names[first if first in PROJECTIONS else name] = None
    return list(names)


def _had_parts(place: _Place) -> list[str]:
    """Names of the weights that the attention of a place has, as `_parts` gives them."""
    attention = place.attention
    if place.replaced:
        return _parts(attention.layer)
    names = [part for part in PROJECTIONS if part != "k" or not place.tied]
    for name, _ in attention.named_parameters():
        if name.split(".")[0] not in ("qkv", "proj"):
            names.append(name)
    return names + ["dropout of attention weights"] * (attention.attn_drop.p > 0)


def _union(lists: Iterable[list[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))
