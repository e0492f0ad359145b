"""Small trained models that come with the package, to look into without training one first.

Five of softpp_nano with different attentions, trained on handwritten digits; `make embedded` trains
them anew.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ..errors import UserError
from ..files import write_atomically
from .predict import Classifier, read_run_checkpoint

EMBEDDED = ("softpp", "soft", "softmax", "performer", "nystromformer")
"""Their attentions."""

_FOLDER = Path(__file__).parents[1] / "weights"


def embedded_classifier(attention: str = "softpp", size: int | None = None) -> Classifier:
    """One of `EMBEDDED`.

    Args:
        attention: Its name.
        size: Side to resize images to; 32, as in training, if not given.
    """
    if attention not in EMBEDDED:
        known = ", ".join(EMBEDDED)
        raise UserError(f"no model with attention {attention!r} is embedded; choose one of {known}")
    with safe_open(_file(attention), framework="pt") as file:
        checkpoint: dict[str, Any] = json.loads(file.metadata()["checkpoint"])
    checkpoint["state_dict"] = load_file(_file(attention))
    return Classifier(checkpoint, size)


def embed(run: Path) -> Path:
    """Writes the model of a run's folder into the package, its weights in half precision."""
    checkpoint = read_run_checkpoint(run / "last.ckpt")
    about = {name: checkpoint[name] for name in ("hyper_parameters", "images")}
    target = _file(about["hyper_parameters"]["attention"])
    metadata = {"checkpoint": json.dumps(about, default=str)}
    write_atomically(target, save(in_half_precision(checkpoint), metadata))
    return target


def in_half_precision(checkpoint: dict[str, Any], without: str = "") -> dict[str, Tensor]:
    """The weights of a run's model.

    Args:
        checkpoint: Of the run.
        without: What their names lose at the beginning.
    """
    return {
        name.removeprefix(without): (
            tensor.half() if tensor.is_floating_point() else tensor
        ).contiguous()
        for name, tensor in checkpoint["state_dict"].items()
        if name.startswith("model.")
    }


def _file(attention: str) -> Path:
    return _FOLDER / f"digits-{attention}.safetensors"


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(f"written: {embed(Path(folder))}")
