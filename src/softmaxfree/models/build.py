"""A model by name and options: any of timm's, with another attention in it."""

from difflib import get_close_matches
from typing import Any

import timm
from torch import nn

from ..errors import UserError
from .replace import replace_attention, replaceable
from .replace import tie_qk as make_tied


def build_model(
    backbone: str,
    num_classes: int,
    attention: str | None = None,
    tie_qk: bool | None = None,
    drop_path: float = 0.0,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """A model of timm; a name that it does not know is refused with those that are near.

    Another attention, or Q = K, is put into timm's own models, and passed on to all others.
    """
    if not timm.is_model(backbone):
        near = get_close_matches(backbone, timm.list_models(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"timm has no model {backbone!r}{hint}")

    def create(**more: Any) -> nn.Module:
        return timm.create_model(
            backbone,
            num_classes=num_classes,
            drop_path_rate=drop_path,
            **(options or {}),
            **more,
        )

    chosen: dict[str, Any] = {"attention": attention, "tie_qk": tie_qk}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    package = timm.model_entrypoint(backbone).__module__.partition(".")[0]
    if package == "softmaxfree":
        return create(**chosen)
    model = create()
    if package != "timm" and not replaceable(model):
        return create(**chosen) if chosen else model
    if attention:
        given = {} if tie_qk is None else {"tie_qk": tie_qk}
        replace_attention(model, attention, measure=False, **given)
    elif tie_qk:
        make_tied(model)
    return model
