"""Projections of queries, keys and values in timm's models: taken apart, joined, renamed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from ..errors import UserError
from .replaced_modules import Replaced, TiedProjection

PROJECTIONS = ("q", "k", "v", "proj")


@dataclass(frozen=True)
class Projections:
    """The linear layers of an attention."""

    q: nn.Linear
    k: nn.Linear | None
    """None if queries are keys."""
    v: nn.Linear
    proj: nn.Linear


def projections_of(attention: Any) -> Projections:
    """Finds the projections of timm's attention, or of one in its place."""
    if isinstance(attention, Replaced):
        layer: Any = attention.layer
        k = attention.keys.beside(layer.q) if attention.keys else layer.k
        return Projections(layer.q, k, layer.v, layer.proj)
    qkv = attention.qkv
    if isinstance(qkv, TiedProjection):
        return Projections(qkv.q, None, qkv.v, attention.proj)
    check_projections(attention)
    q, k, v = split_projections(qkv)
    return Projections(q, k, v, attention.proj)


def check_projections(attention: Any) -> None:
    """Refuses projections that are not linear layers from all channels to as many."""
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


def split_projections(qkv: nn.Linear) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Copies of the projections of queries, keys and values."""
    biases = (None,) * 3 if qkv.bias is None else qkv.bias.chunk(3)
    q, k, v = (
        _linear([weight], None if bias is None else [bias]).train(qkv.training)
        for weight, bias in zip(qkv.weight.chunk(3), biases)
    )
    return q, k, v


def join_projections(*parts: nn.Linear) -> nn.Linear:
    """One linear layer that concatenates the outputs of the parts."""
    bias = None if parts[0].bias is None else [part.bias for part in parts]
    return _linear([part.weight for part in parts], bias)


def _linear(weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> nn.Linear:
    """A linear layer with copies of these rows, trainable if any of them is."""
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


def rename_projections(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Adds to weights of a ViT or Swin their projections under the names that a model has for them.

    The weights may come from a model with timm's own attention, with another one, or with queries
    tied to keys. If they have no keys, the queries serve as keys.

    Args:
        state: A state dict; weights that it has under the model's names stay as they are.
        model: The model that will load the weights.
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
    """Finds q, k, v and proj of an attention, whatever names they were saved under."""
    found = {}
    if f"{place}.qkv.{leaf}" in state:
        found = dict(zip(("q", "k", "v"), state[f"{place}.qkv.{leaf}"].chunk(3)))
    for prefix in (f"{place}.", f"{place}.qkv.", f"{place}.layer."):
        for part in PROJECTIONS:
            if f"{prefix}{part}.{leaf}" in state:
                found[part] = state[f"{prefix}{part}.{leaf}"]
    return {"k": found["q"]} | found if "q" in found else found
