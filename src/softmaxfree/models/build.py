"""A model by name and options: any of timm's, with another attention in it."""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from inspect import signature
from typing import Any

import timm
import torch
from torch import nn

from ..errors import UserError
from .attention_places import replaceable
from .replace import replace_attention
from .replace import tie_qk as make_tied


@dataclass(frozen=True)
class BackboneConfig:
    """A model of timm by name, and what is changed in it."""

    name: str
    attention: str | None = None
    """Another attention in place of its own."""
    tie_qk: bool | None = None
    """Whether queries and keys share one projection; as the model has it if None."""
    drop_path: float = 0.0
    """Probability of leaving out a block, rising with depth."""
    options: dict[str, Any] | None = None
    """Further arguments of the model."""

    def with_options(self, **more: Any) -> "BackboneConfig":
        """The same, with further arguments where it has none of that name."""
        return replace(self, options={**more, **(self.options or {})})


def build_model(backbone: BackboneConfig | str, num_classes: int | None) -> nn.Module:
    """Builds a model of timm; an unknown name is refused with the names nearest to it.

    The tag of a name is checked, but no weights are loaded (`weights.py` does).

    Another attention, or Q = K, is put into timm's own models, and passed on to all others.

    Args:
        backbone: The model; a name alone stands for the model as it is.
        num_classes: Width of the logits; 0 for a model without a head, None for the model's own.
    """
    config = BackboneConfig(backbone) if isinstance(backbone, str) else backbone
    if not timm.is_model(config.name):
        near = get_close_matches(config.name, timm.list_models(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"timm has no model {config.name!r}{hint}")
    try:
        timm.get_pretrained_cfg(config.name)
    except RuntimeError as error:
        name, _, tag = config.name.partition(".")
        known = timm.list_pretrained(f"{name}.*")
        raise UserError(
            f"{name} has no weights {tag!r}; "
            + (f"choose {' or '.join(known[:6])}" if known else f"give {name} to train it")
        ) from error

    def create(**more: Any) -> nn.Module:
        try:
            return timm.create_model(
                config.name,
                num_classes=num_classes,
                drop_path_rate=config.drop_path,
                **(config.options or {}),
                **more,
            )
        except TypeError as error:
            for name in config.options or {}:
                if f"multiple values for keyword argument {name!r}" in str(error):
                    raise UserError(
                        f"{name} has an argument of its own: leave it out of the options"
                    ) from error
                if f"unexpected keyword argument {name!r}" in str(error):
                    with torch.device("meta"):
                        known = signature(type(timm.create_model(config.name))).parameters
                    near = " or ".join(get_close_matches(name, known))
                    hint = f"did you mean {near}?" if near else f"it has {', '.join(known)}"
                    raise UserError(f"{config.name} has no option {name!r}; {hint}") from error
            raise

    changed: dict[str, Any] = {"attention": config.attention, "tie_qk": config.tie_qk}
    changed = {name: value for name, value in changed.items() if value is not None}
    package = timm.model_entrypoint(config.name).__module__.partition(".")[0]
    if package == "softmaxfree":
        return create(**changed)
    model = create()
    if package != "timm" and not replaceable(model):
        return create(**changed) if changed else model
    if attention := changed.pop("attention", None):
        replace_attention(model, attention, measure=False, **changed)
    elif config.tie_qk:
        make_tied(model)
    return model
