"""Projections of queries, keys and values, under the names that timm and torch have for them."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .replaced_modules import ORIGINALS, Replaced, TiedProjection

PROJECTIONS = ("q", "k", "v", "proj")

_LEAVES = ("weight", "bias")
_STORED: dict[str, tuple[str, ...]] = {
    f"{prefix}{leaf}": tuple(f"{part}.{leaf}" for part in parts)
    for leaf in _LEAVES
    for prefix, parts in (
        ("qkv.", ("q", "k", "v")),
        ("in_proj_", ("q", "k", "v")),  # of torch
        ("out_proj.", ("proj",)),
        *(
            (prefix.format(part), (part,))
            for part in PROJECTIONS
            # One's own, replaced, tied, of EVA; `q_bias` of BEiT beside a qkv without a bias.
            for prefix in ("{}.", "layer.{}.", "qkv.{}.", "{}_proj.", "{}_")
        ),
    )
}
"""Names of parameters of an attention, and the projections that they hold one after another."""


@dataclass(frozen=True)
class Projections:
    """The linear layers of an attention."""

    q: nn.Linear
    k: nn.Linear | None
    """None if queries are keys."""
    v: nn.Linear
    proj: nn.Linear

    def tensors(self) -> dict[str, Tensor]:
        """Weights and biases by name; the keys' are those of the queries if these are keys."""
        layers = zip(PROJECTIONS, (self.q, self.k or self.q, self.v, self.proj))
        return {
            f"{part}.{name}": tensor
            for part, layer in layers
            for name, tensor in layer.named_parameters()
        }


def projections_of(attention: Any) -> Projections:
    """Finds the projections of timm's or torch's attention (copies), or of one in its place."""
    if isinstance(attention, Replaced):
        layer: Any = attention.layer
        k = attention.keys.beside(layer.q) if attention.keys else layer.k
        return Projections(layer.q, k, layer.v, layer.proj)
    found = _split(dict(attention.named_parameters()))
    tied = isinstance(getattr(attention, "qkv", None), TiedProjection)
    parts = [part for part in PROJECTIONS if part != "k" or not tied]
    if missing := [part for part in parts if f"{part}.weight" not in found]:
        raise UserError(
            f"{' and '.join(missing)} of {type(attention).__name__} must be linear layers, and it "
            f"holds {', '.join(name for name, _ in attention.named_parameters())}; merge or "
            "remove what is around them"
        )
    width = found["q.weight"].shape[1]
    for part in parts:
        weight = found[f"{part}.weight"]
        if weight.shape != (width, width):
            got = weight.shape[part == "proj"]
            raise UserError(
                f"heads must share the width of the tokens, {width}, got {got} for "
                f"all of them together in {part}; build the model without a head_dim of its own "
                "and with as many heads of keys as of queries"
            )
    layers = {
        part: _linear(found[f"{part}.weight"], found.get(f"{part}.bias")).train(attention.training)
        for part in parts
    }
    return Projections(layers["q"], layers.get("k"), layers["v"], layers["proj"])


def stored_names(attention: nn.Module) -> list[str]:
    """Names of the parameters in which an attention holds its projections."""
    return [name for name, _ in attention.named_parameters() if name in _STORED]


def empty_projections(original: nn.Module) -> None:
    """Frees the memory of the projections; their names and shapes remain."""
    for name in stored_names(original):
        empty = torch.empty_like(original.get_parameter(name), device="meta")
        _set(original, name, nn.Parameter(empty))


def fill_projections(original: Any, projections: Projections, tied: bool) -> None:
    """Puts copies of the projections into timm's or torch's own attention."""
    tensors = projections.tensors()
    if tied and projections.k is not None:  # no longer
        rows, width = 3 * projections.q.out_features, projections.q.in_features
        original.qkv = nn.Linear(width, rows, projections.q.bias is not None, device="meta")
    for name in stored_names(original):
        _set(original, name, _parameter([tensors[part] for part in _STORED[name]]))


def keys_like(q: nn.Linear, original: nn.Module) -> nn.Linear:
    """A copy of the queries' projection as the keys', with a bias if the original's keys have."""
    k = deepcopy(q)
    held = {part for name in stored_names(original) for part in _STORED[name]}
    if "k.weight" in held and "k.bias" not in held:
        k.register_parameter("bias", None)
    return k


def rename_projections(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Adds the projections in a state dict under the names that a model has for them.

    The weights may come from a model with its own attention, with another one, or with queries
    tied to keys. If they have no keys, the queries serve as keys.

    Args:
        state: A state dict; weights that it has under the model's names stay as they are.
        model: The model that will load the weights.
    """
    renamed: dict[str, Tensor] = {}
    for place, attention in model.named_modules():
        if not isinstance(attention, (*ORIGINALS, Replaced)):
            continue
        prefix = f"{place}." if place else ""
        found = _split({name: state[prefix + name] for name in _STORED if prefix + name in state})
        if "q.weight" in found and "k.weight" not in found:
            found |= {f"k.{leaf}": found[f"q.{leaf}"] for leaf in _LEAVES if f"q.{leaf}" in found}
        if "q.bias" in found:
            found.setdefault("k.bias", torch.zeros_like(found["q.bias"]))
        for name in stored_names(attention):
            if all(part in found for part in _STORED[name]):
                renamed[prefix + name] = torch.cat([found[part] for part in _STORED[name]])
    return renamed | dict(state)


def _split(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Single projections of parameters by name; others are left out."""
    return {
        part: rows
        for name, tensor in stored.items()
        if name in _STORED
        for part, rows in zip(_STORED[name], tensor.chunk(len(_STORED[name])))
    }


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with copies of its weights."""
    layer = nn.Linear(1, 1, bias is not None, device="meta")
    layer.weight = _parameter([weight])
    layer.out_features, layer.in_features = layer.weight.shape
    if bias is not None:
        layer.bias = _parameter([bias])
    return layer


def _parameter(rows: Sequence[Tensor]) -> nn.Parameter:
    """Copies of these rows, trainable if any of them is."""
    return nn.Parameter(
        torch.cat([row.detach() for row in rows]).clone(), any(row.requires_grad for row in rows)
    )


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    holder, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(holder), leaf, parameter)
