"""Another attention in models of timm and torch: put in, and taken out again."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Attention
from torch import nn

from ..errors import UserError
from ..layers.attention import NUM_LANDMARKS
from ..layers.multihead import MultiHeadAttention
from ..layers.registry import attention_options, build_attention, chosen_options
from .attention_places import Place, backbone_of, left_alone, places_of, union
from .options import check_own_options, window_ratio
from .projections import (
    PROJECTIONS,
    empty_projections,
    fill_projections,
    keys_like,
    projections_of,
    stored_names,
)
from .replaced_modules import (
    WHOLE_MAP,
    Keys,
    MapAttention,
    Replaced,
    SequenceAttention,
    TiedProjection,
    TokenAttention,
    image_grid,
    remove_grid,
)
from .replacement_report import Replacement, measure_model

ORIGINAL = "original"
"""The name of a model's own attention."""

_COPIED = "k (a copy of q)"
_EXTRAS = {
    "q_norm": "qk_norm",
    "k_norm": "qk_norm",
    "norm": "scale_attn_norm (of EVA: scale_attn_inner)",
    "gate": "gated",
    "bias_k": "add_bias_kv",
}
"""Parts that an attention may have, and the arguments that ask for them."""
_MEANINGS = {"cpb_mlp": "bias of relative positions", "logit_scale": "of cosine similarities"}
"""Parts of Swin V2's attention whose names do not say what they are."""


def replace_attention(
    model: nn.Module, name: str, *, measure: bool = True, **options: Any
) -> Replacement:
    """Replaces the attention of a model in place, or puts the original back.

        report = replace_attention(model, "softpp", num_landmarks=49)
        print(report)
        replace_attention(model, "original")  # the model as it came

    It takes timm's ViT, DeiT, BEiT, EVA, Swin and Swin V2, and any module that holds
    `nn.MultiheadAttention`, such as `nn.TransformerEncoder`, as attention over sequences.

    The projections of queries, keys, values and results are kept; other weights of the new
    attention are drawn at random and have to be trained. In a Swin the new attention sees the whole
    map, without windows and shifts. EVA's rotary positions are kept. Build optimisers anew: they
    hold the old parameters.

    Weights that the new attention cannot hold are set aside for the way back: the projection of
    keys, if it is tied to that of queries, and biases of relative positions. They are not in the
    model's `state_dict`. If the queries have changed since, the keys come back as a copy of them;
    the bias comes back unchanged.

    In torch's modules, key padding masks and cross-attention work as before, `attn_mask` and
    `is_causal` are refused, weights (`need_weights`) are None, and an encoder's fast path is not
    taken. For cross-attention pass `tie_qk=False`, which keeps the projection of keys. Landmarks
    are made of all queries, so that each result depends on the other queries: both attentions of
    `nn.TransformerDecoderLayer`, which is causal, stay as they are.

    Args:
        model: Such a model of timm, or what `features_only=True` makes of one; or a module that
            holds torch's attentions.
        name: A name of `softmaxfree.layers.registry`, or `original` for the model's own attention.
        measure: Measure multiply-adds and memory of a model of images before and after, which
            takes some forward passes of the model at its own input size.
        options: Options of the attention, such as `num_landmarks`, `ratio` or `value_conv`. An
            attention with landmarks has 49 if neither of the first two is given.
    """
    core = backbone_of(model, "replace_attention")
    places = places_of(core)
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
        if getattr(core, "rel_pos_bias", None) is not None:
            raise UserError(
                "the layers of this model share a bias of relative positions, which has no place "
                "in another attention; build it with use_shared_rel_pos_bias=False"
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
        union(change.kept for change in changes),
        union(change.new for change in changes),
        union(change.dropped for change in changes),
        left_alone(core),
    )


def tie_qk(model: nn.Module) -> nn.Module:
    """Makes queries the keys in a timm ViT, DeiT or Swin, in place; returns the model.

    Every attention loses its projection of keys and becomes softmax attention with a symmetric
    kernel, as in the paper's ablation.

    Args:
        model: Such a model of timm, with its own attention.
    """
    places = places_of(backbone_of(model, "tie_qk"))
    for place in places:
        if place.replaced:
            raise UserError(
                "tie_qk is for timm's own attention, and this model's is replaced; pass "
                "tie_qk=True to replace_attention, or put the original back first"
            )
        if not isinstance(place.attention, Attention | WindowAttention):
            raise UserError(
                "tie_qk is for timm's ViT, DeiT and Swin; in this model replace the attention: "
                "replace_attention(model, 'softmax', tie_qk=True)"
            )
        if isinstance(place.attention.qkv, TiedProjection):
            raise UserError("queries and keys of this model are tied already; leave tie_qk out")
        _refuse_extras(place.attention, ("q_norm", "k_norm"))
    for place, had in [(place, projections_of(place.attention)) for place in places]:
        place.attention.qkv = TiedProjection(had.q, had.v).train(place.attention.training)
    return model


@dataclass(frozen=True)
class _Change:
    """A change to make at a place: another attention, or the original if `layer` is None."""

    place: Place
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


def _built(name: str, place: Place, options: dict[str, Any]) -> _Change:
    """Builds the attention of that name with the weights that it can take over."""
    _refuse_extras(place.original, tuple(_EXTRAS))
    had = projections_of(place.attention)
    old = place.attention.layer if place.replaced else place.attention
    defaults: dict[str, Any] = {"ndim": 1}
    if place.grid is not None:
        defaults = {"max_size": place.grid, "prefix_tokens": place.prefix}
        if "num_landmarks" in options:
            defaults["ratio"] = window_ratio(min(place.grid), options["num_landmarks"])
    elif "max_size" in attention_options(name):
        raise UserError(
            f"attention {name!r} is for sequences of one length, and this model has none of its "
            "own; choose another attention"
        )
    if place.tied:
        defaults["tie_qk"] = True
    layer = build_attention(
        name,
        had.q.in_features,
        old.num_heads,
        qkv_bias=had.q.bias is not None,
        **(defaults | options),
    )
    if place.rotary and type(layer).reduce is not MultiHeadAttention.reduce:
        raise UserError(
            f"attention {name!r} has keys on a smaller grid than queries, where this model's "
            "rotary positions have no meaning; choose another attention"
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
        setattr(layer, part, keys_like(had.q, place.original) if given is None else given)
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


def _restored(place: Place) -> _Change:
    """Plans to put the original back with the weights that it can take over."""
    parts = _parts(place.attention.layer)
    kept = [part for part in parts if part in PROJECTIONS]
    if "k" not in parts and not place.tied:
        kept.append("k" if projections_of(place.attention).k is not None else _COPIED)
    kept += _others(place.original)
    return _Change(place, None, None, kept, [], [part for part in parts if part not in kept])


def _commit(core: Any, change: _Change) -> None:
    """Makes a change."""
    place, layer = change.place, change.layer
    holder, attention = place.holder, place.attention
    if layer is None:
        new = _put_back(attention)
        if isinstance(attention, MapAttention):
            holder.__class__ = type(holder).__base__
    elif isinstance(attention, Replaced):
        attention.layer, attention.keys = layer, change.keys
        return
    else:
        given = (layer, attention, place.tied, change.keys)
        empty_projections(attention)
        if place.grid is None:
            new = SequenceAttention(*given)
        elif type(holder) in WHOLE_MAP:
            new = MapAttention(*given)
            holder.__class__ = WHOLE_MAP[type(holder)]
        else:
            new = TokenAttention(*given, image_grid(core))
    setattr(holder, place.name, new)


def _put_back(attention: Replaced) -> nn.Module:
    """The original, with the weights as they are now."""
    had, original = projections_of(attention), attention.original
    fill_projections(original, had, attention.tied)
    weight = had.q.weight
    return original.to(device=weight.device, dtype=weight.dtype).train(attention.training)


def _refuse_extras(attention: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(getattr(attention, name, None), nn.Identity | None):
            raise UserError(
                f"the model's attention has {name}, which has no place in another; build the "
                f"model without {_EXTRAS[name]}"
            )
    if getattr(attention, "add_zero_attn", False) or not getattr(
        attention, "_qkv_same_embed_dim", True
    ):
        raise UserError(
            "an nn.MultiheadAttention with add_zero_attn, kdim or vdim has no place for another; "
            "build it without them"
        )


def _parts(layer: MultiHeadAttention) -> list[str]:
    """Names of a layer's weights; a projection counts as one."""
    names: dict[str, None] = {}
    for name, _ in layer.named_parameters():
        first = name.split(".")[0]
        names[first if first in PROJECTIONS else name] = None
    return list(names)


def _had_parts(place: Place) -> list[str]:
    """What the attention of a place has: weights, as `_parts` gives them, and what it does."""
    attention = place.attention
    if place.replaced:
        return _parts(attention.layer)
    names = [part for part in PROJECTIONS if part != "k" or not place.tied]
    names += _others(attention)
    # torch's has a number, timm's a module.
    if getattr(attention, "dropout", 0) or getattr(getattr(attention, "attn_drop", None), "p", 0):
        names.append("dropout of attention weights")
    return names + ["attention weights (need_weights)"] * (place.grid is None)


def _others(attention: nn.Module) -> list[str]:
    """Weights of timm's or torch's attention beside projections."""
    projections = stored_names(attention)
    firsts = [n.split(".")[0] for n, _ in attention.named_parameters() if n not in projections]
    return [
        f"{name} ({_MEANINGS[name]})" if name in _MEANINGS else name
        for name in dict.fromkeys(firsts)
    ]
