"""Another attention in timm's ViT, DeiT and Swin: put in, measured, and taken out again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from textwrap import wrap
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
from torch import Tensor, nn

from ..errors import UserError
from ..layers.multihead import MultiHeadAttention
from ..layers.registry import attention_options, build_attention, chosen_options
from ..layers.samplers import Size
from ..ops.tracing import ceil_div
from .cost import cost, image_bytes
from .options import check_own_options, window_ratio

ORIGINAL = "original"
"""The name of timm's own attention."""

NUM_LANDMARKS = 49
"""Landmarks if neither `num_landmarks` nor `ratio` is given."""

_PROJECTIONS = ("q", "k", "v", "proj")
_COPIED = "k (a copy of q)"
_EXTRAS = {"q_norm": "qk_norm", "k_norm": "qk_norm", "norm": "scale_attn_norm", "gate": "gated"}
"""Parts that timm's attention may have, and the arguments that ask for them."""


@dataclass(frozen=True)
class Measured:
    """What a model is at its own input size."""

    parameters: int
    multiply_adds: float | None
    """Of one image; None if not measured."""
    memory: int | None
    """Bytes that training keeps of one image for the backward pass; None if not measured."""


@dataclass(frozen=True)
class Replacement:
    """What `replace_attention` has done; printed, it is a small table."""

    name: str
    """Of the attention that the model has now."""
    layers: int
    """How many were replaced."""
    before: Measured
    after: Measured
    kept: tuple[str, ...]
    """Weights that the layers have taken over."""
    new: tuple[str, ...]
    """Weights that are to be trained."""
    dropped: tuple[str, ...]
    """What the attention before had and this one has no place for."""

    def __str__(self) -> str:
        lines = [f"attention {self.name!r} in {self.layers} layer{'s' * (self.layers != 1)}"]
        lines.append(f"{'':22}{'before':>12}{'after':>12}{'change':>10}")
        for title, before, after, unit in (
            ("parameters", self.before.parameters, self.after.parameters, ""),
            ("multiply-adds", self.before.multiply_adds, self.after.multiply_adds, ""),
            ("memory of an image", self.before.memory, self.after.memory, "B"),
        ):
            if before is not None and after is not None:
                change = f"{after / before - 1:+.1%}" if before else ""
                cells = f"{_short(before, unit):>12}{_short(after, unit):>12}{change:>10}"
                lines.append(f"{title:22}{cells}".rstrip())
        for title, names in (("kept", self.kept), ("new", self.new), ("dropped", self.dropped)):
            if names:
                lines += wrap(f"{title + ':':9}{', '.join(names)}", 80, subsequent_indent=" " * 9)
        return "\n".join(lines)


def replace_attention(
    model: nn.Module, name: str, *, measure: bool = True, **options: Any
) -> Replacement:
    """Replaces the attention of a timm ViT, DeiT or Swin in place, or puts the original back.

        report = replace_attention(model, "softpp", num_landmarks=49)
        print(report)
        replace_attention(model, "original")  # the model as it came

    What the new attention has no place for is set aside for the way back: the keys' projection, if
    it is tied, and a Swin's bias of relative positions. Neither is in the model's `state_dict`.
    Where queries have been trained or loaded since, keys come back as a copy of them; the bias
    comes back as it was set aside.

    Projections are kept. In a Swin the new attention is over the whole map: windows and their
    shifts are left out, and come back with the original. The weights of the new attention that are
    not kept are drawn at random, to be trained. Optimisers that hold the model's parameters are to
    be built anew.

    Args:
        model: A `VisionTransformer` (also distilled) or `SwinTransformer` of timm, or what
            `features_only=True` makes of one.
        name: As in `softmaxfree.layers.registry`; `original` for timm's own.
        measure: Whether to measure multiply-adds and memory before and after, which takes some
            forward passes of the model at its own input size.
        options: Of that attention, such as `num_landmarks`, `ratio` or `value_conv`. An attention
            with landmarks gets 49 of them if neither of the first two is given.
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
    before = _measure(model, core, measure)
    for change in changes:
        _commit(core, change)
    if name == ORIGINAL:
        _remove_grid(core)
    return Replacement(
        name,
        len(changes),
        before,
        _measure(model, core, measure),
        _union(change.kept for change in changes),
        _union(change.new for change in changes),
        _union(change.dropped for change in changes),
    )


def tie_qk(model: nn.Module) -> nn.Module:
    """Makes queries and keys of a timm ViT, DeiT or Swin the same, in place; returns the model.

    Every attention keeps the projections of queries and of values and loses that of keys: what is
    left is softmax attention with a symmetric kernel, as in the paper's ablation.

    Args:
        model: As of `replace_attention`, with timm's own attention.
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
        _check_projection(place.attention)
    for place in places:
        qkv = place.attention.qkv
        q, _, v = _split(qkv)
        place.attention.qkv = TiedProjection(q, v).train(qkv.training)
    return model


def replaceable(model: nn.Module) -> bool:
    """Whether a model is of the kind that `replace_attention` and `tie_qk` are for."""
    return _core(model) is not None


def rename_projections(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights of a ViT or Swin, with the projections also under the names the model has for them.

    They may come from a model with timm's own attention, with another in its place, or with
    queries tied to keys. Where they have no keys, these are the queries.

    Args:
        state: A state dict; what it has under a name of the model's stays as it is.
        model: What is to take the weights.
    """
    renamed: dict[str, Tensor] = {}
    for place, attention in model.named_modules():
        if not isinstance(attention, Attention | WindowAttention | Replaced):
            continue
        for leaf in ("weight", "bias"):
            found = _saved_projections(state, place, leaf)
            if isinstance(attention, Replaced):
                found = {f"layer.{part}": tensor for part, tensor in found.items()}
            elif isinstance(attention.qkv, TiedProjection):
                found = {f"qkv.{p}" if p != "proj" else p: tensor for p, tensor in found.items()}
            elif {"q", "v"} <= set(found):
                found["qkv"] = torch.cat([found.pop(part) for part in ("q", "k", "v")])
            renamed |= {f"{place}.{part}.{leaf}": tensor for part, tensor in found.items()}
    return renamed | dict(state)


def _saved_projections(state: Mapping[str, Tensor], place: str, leaf: str) -> dict[str, Tensor]:
    """The tensors q, k, v and proj of an attention, whatever names they were saved under."""
    found = {}
    if f"{place}.qkv.{leaf}" in state:
        found = dict(zip(("q", "k", "v"), state[f"{place}.qkv.{leaf}"].chunk(3)))
    for prefix in (f"{place}.", f"{place}.qkv.", f"{place}.layer."):
        for part in _PROJECTIONS:
            if f"{prefix}{part}.{leaf}" in state:
                found[part] = state[f"{prefix}{part}.{leaf}"]
    return {"k": found["q"]} | found if "q" in found else found


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
    """The grid of the image that passes through a ViT.

    A hook of its patch embedding reads it. Gradient checkpointing runs blocks again when other
    images have passed: before a block, and before its attention, the grid is left with the memory
    of the tokens, which a checkpoint keeps, and is found there again. Where saved tensors are
    moved meanwhile (`torch.autograd.graph.save_on_cpu`), all images before one backward pass must
    have one grid.
    """

    def __init__(self, size: Size) -> None:
        self.size = size

    def __call__(self, embed: Any, inputs: tuple[Tensor, ...], tokens: Tensor) -> None:
        if tokens.ndim == 4:  # (B, H, W, dim), of models with dynamic_img_size
            self.size = tuple(tokens.shape[1:3])
        else:
            self.size = tuple(embed.dynamic_feat_size(tuple(inputs[0].shape[-2:])))

    def before_block(self, block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.of(inputs[0])

    def of(self, tokens: Tensor) -> Size:
        """That of tokens (B, prefix + N, dim) that pass for the first time, or once more."""
        if not torch.compiler.is_compiling():
            try:
                memory: Any = tokens.untyped_storage()
            except NotImplementedError:  # of torch.func's tensors, which have none
                return self.size
            self.size = memory.__dict__.setdefault("softmaxfree_grid", self.size)
        return self.size


@dataclass(frozen=True)
class Keys:
    """Keys' projection that a tied attention has no place for, and the queries' it belongs to."""

    q: nn.Linear
    k: nn.Linear

    def beside(self, q: nn.Linear) -> nn.Linear | None:
        """The projection, as long as the queries' is what it was."""
        for was, now in ((self.q.weight, q.weight), (self.q.bias, q.bias)):
            if now is not None and not now.is_meta and not torch.equal(was.to(now), now):
                return None
        return deepcopy(self.k).to(q.weight).train(q.training)


class Replaced(nn.Module):
    """An attention in the place of timm's, which it keeps to be put back.

    Args:
        layer: The attention.
        original: timm's, without the weights that the layer has taken over.
        tied: Whether timm's had one projection for queries and keys.
        keys: Of a layer without keys, those that were there before.
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
        return self._original[0]


class TokenAttention(Replaced):
    """Called as the attention of timm's ViT is."""

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
        """Of the original, for when it is put back."""
        self.original.set_window_size(window_size)


class WholeMapBlock(SwinTransformerBlock):
    """A Swin's block, once its attention is replaced: no windows, no shifts."""

    def _attn(self, x: Tensor) -> Tensor:
        return self.attn(x)


@dataclass(frozen=True)
class _Place:
    """Where an attention is."""

    holder: Any
    """What has it as `attn`: a block, or a branch of a block of several."""
    grid: tuple[int, int]
    """Of the tokens, at the model's own input size."""
    prefix: int

    @property
    def attention(self) -> Any:
        return self.holder.attn

    @property
    def replaced(self) -> bool:
        return isinstance(self.attention, Replaced)

    @property
    def tied(self) -> bool:
        """Whether timm's own attention has, or had, one projection for queries and keys."""
        attention = self.attention
        return attention.tied if self.replaced else isinstance(attention.qkv, TiedProjection)


@dataclass(frozen=True)
class _Change:
    """What is to become of a place: another attention, or timm's own if there is none."""

    place: _Place
    layer: MultiHeadAttention | None
    keys: Keys | None
    """What the layer has no place for."""
    kept: list[str]
    new: list[str]
    dropped: list[str]


@dataclass(frozen=True)
class _Projections:
    q: nn.Linear
    k: nn.Linear | None
    """None if queries are keys."""
    v: nn.Linear
    proj: nn.Linear


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


def _chosen(name: str, options: dict[str, Any]) -> dict[str, Any]:
    check_own_options(name, options)
    if "qkv_bias" in options:
        raise UserError("qkv_bias follows from the model's weights; leave it out")
    chosen = chosen_options(name, **options)
    if not {"num_landmarks", "ratio"} & set(chosen) and "num_landmarks" in attention_options(name):
        chosen["num_landmarks"] = NUM_LANDMARKS
    return chosen


def _built(name: str, place: _Place, options: dict[str, Any]) -> _Change:
    """The attention of that name, with the weights that it can take over; nothing changes yet."""
    had = _projections(place.attention)
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
    for part in _PROJECTIONS:
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
    """Copies what both have under one name, beside the projections; returns the names."""
    copied = {}
    source = dict([*old.named_parameters(), *old.named_buffers()])
    for name, target in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.split(".")[0] in _PROJECTIONS:
            continue
        if name in source and source[name].shape == target.shape:
            with torch.no_grad():
                target.copy_(source[name])
            if isinstance(target, nn.Parameter):
                target.requires_grad_(source[name].requires_grad)
                copied[name] = name
    return copied


def _restored(place: _Place) -> _Change:
    """timm's own attention, with the weights that it can take over; nothing changes yet."""
    parts = _parts(place.attention.layer)
    kept = [part for part in parts if part in _PROJECTIONS]
    if "k" not in parts and not place.tied:
        kept.append("k" if _projections(place.attention).k is not None else _COPIED)
    kept += [name for name, _ in place.attention.original.named_parameters()]
    return _Change(place, None, None, kept, [], [part for part in parts if part not in kept])


def _commit(core: Any, change: _Change) -> None:
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
            holder.attn = TokenAttention(layer, attention, tied, change.keys, _grid(core))


def _put_back(attention: Replaced) -> nn.Module:
    """timm's own module, with the weights as they are now."""
    had, original = _projections(attention), attention.original
    if had.k is None and attention.tied:
        original.qkv = TiedProjection(had.q, had.v)
    else:
        original.qkv = _join(had.q, had.q if had.k is None else had.k, had.v)
    original.proj = had.proj
    weight = had.q.weight
    return original.to(device=weight.device, dtype=weight.dtype).train(attention.training)


def _grid(core: Any) -> Grid:
    """That of the model's hooks; gives it some if it has none."""
    embed = core.patch_embed
    for hook in embed._forward_hooks.values():
        if isinstance(hook, Grid):
            return hook
    grid = Grid(tuple(embed.grid_size))
    embed.register_forward_hook(grid)
    for block in core.blocks:
        block.register_forward_pre_hook(grid.before_block)
    return grid


def _remove_grid(core: Any) -> None:
    for module in core.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _of_grid(hook)]:
                del hooks[key]


def _of_grid(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", hook), Grid)


def _projections(attention: Any) -> _Projections:
    if isinstance(attention, Replaced):
        layer: Any = attention.layer
        k = attention.keys.beside(layer.q) if attention.keys else layer.k
        return _Projections(layer.q, k, layer.v, layer.proj)
    qkv = attention.qkv
    if isinstance(qkv, TiedProjection):
        return _Projections(qkv.q, None, qkv.v, attention.proj)
    _check_projection(attention)
    q, k, v = _split(qkv)
    return _Projections(q, k, v, attention.proj)


def _check_projection(attention: Any) -> None:
    """Refuses projections that are not from all channels to as many."""
    qkv, proj = attention.qkv, attention.proj
    if not isinstance(qkv, nn.Linear) or not isinstance(proj, nn.Linear):
        raise UserError(
            "qkv and proj of timm's attention must be linear layers, got "
            f"{type(qkv).__name__} and {type(proj).__name__}; merge or remove what is around them"
        )
    width = qkv.in_features
    if qkv.out_features != 3 * width or proj.weight.shape != (width, width):
        raise UserError(
            f"heads must share the width of the tokens, {width}, got {qkv.out_features // 3} for "
            "all of them together; build the model without a head_dim of its own"
        )


def _refuse_extras(attention: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(getattr(attention, name, None), nn.Identity | None):
            raise UserError(
                f"the model's attention has {name}, which has no place in another; build the "
                f"model without {_EXTRAS[name]}"
            )


def _split(qkv: nn.Linear) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Queries', keys' and values' projections, copied."""
    biases = (None,) * 3 if qkv.bias is None else qkv.bias.chunk(3)
    q, k, v = (
        _linear([weight], None if bias is None else [bias]).train(qkv.training)
        for weight, bias in zip(qkv.weight.chunk(3), biases)
    )
    return q, k, v


def _join(*parts: nn.Linear) -> nn.Linear:
    """One layer that gives what the parts give, one after another."""
    bias = None if parts[0].bias is None else [part.bias for part in parts]
    return _linear([part.weight for part in parts], bias)


def _linear(weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> nn.Linear:
    """A layer of copies of these rows, trained if any of them are."""
    layer = nn.Linear(1, 1, biases is not None, device="meta")
    layer.weight = _parameter(weights)
    layer.out_features, layer.in_features = layer.weight.shape
    if biases is not None:
        layer.bias = _parameter(biases)
    return layer


def _parameter(rows: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(
        torch.cat([row.detach() for row in rows]).clone(), any(row.requires_grad for row in rows)
    )


def _parts(layer: MultiHeadAttention) -> list[str]:
    """Its weights by name; a projection's two are one."""
    names: dict[str, None] = {}
    for name, _ in layer.named_parameters():
        first = name.split(".")[0]
        names[first if first in _PROJECTIONS else name] = None
    return list(names)


def _had_parts(place: _Place) -> list[str]:
    """What the attention of a place has by name, as `_parts`."""
    attention = place.attention
    if place.replaced:
        return _parts(attention.layer)
    names = [part for part in _PROJECTIONS if part != "k" or not place.tied]
    for name, _ in attention.named_parameters():
        if name.split(".")[0] not in ("qkv", "proj"):
            names.append(name)
    return names + ["dropout of attention weights"] * (attention.attn_drop.p > 0)


def _union(lists: Iterable[list[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))


def _measure(model: nn.Module, core: Any, wanted: bool) -> Measured:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not wanted:
        return Measured(parameters, None, None)
    embed = core.patch_embed
    channels = next(part.in_channels for part in embed.modules() if isinstance(part, nn.Conv2d))
    shape = (channels, *embed.img_size)
    with _unchanged(model), torch.enable_grad():
        return Measured(parameters, cost(model, *shape).multiply_adds, image_bytes(model, *shape))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Buffers, modes and random numbers are afterwards as they were before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, content in buffers:
                setattr(module, name, buffer)
                with torch.no_grad():
                    buffer.copy_(content)


def _short(number: float, unit: str) -> str:
    """1234567 -> 1.23 M."""
    for prefix in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} T{unit}"
