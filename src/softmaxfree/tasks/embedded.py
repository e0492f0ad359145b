"""Small models trained on handwritten digits, to look into without training one first.

softpp_nano with several attentions. The wheel carries SOFT++; a clone of the repository has all of
them. `make embedded` trains them anew.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file

from ..errors import UserError
from .predict import Classifier


def weights_file(attention: str) -> Path:
    """The file of the model with this attention."""
    return Path(__file__).parents[1] / "weights" / f"digits-{attention}.safetensors"


EMBEDDED = tuple(
    name
    for name in ("softpp", "soft", "softmax", "performer", "nystromformer")
    if weights_file(name).is_file()
)
"""The attentions of the models that are here."""


def embedded_classifier(attention: str = "softpp", size: int | None = None) -> Classifier:
    """Loads the digit model with an attention.

    Args:
        attention: A name in `EMBEDDED`.
        size: Side to resize images to; default: 32, as in training.
    """
    if attention not in EMBEDDED:
        known = ", ".join(EMBEDDED)
        raise UserError(f"no model with attention {attention!r} is embedded; choose one of {known}")
    with safe_open(weights_file(attention), framework="pt") as file:
        checkpoint: dict[str, Any] = json.loads(file.metadata()["checkpoint"])
    checkpoint["state_dict"] = load_file(weights_file(attention))
    return Classifier(checkpoint, size)
