"""Writes the models of training runs into the package: `python scripts/embed.py RUN...`.

`make embedded` trains the digit models and calls it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

import softmaxfree
from softmaxfree.files import write_atomically
from softmaxfree.models.checkpoints import read_run_checkpoint


def embed(run: Path) -> Path:
    """Writes the model of a run's folder into the package, its weights in half precision."""
    checkpoint = read_run_checkpoint(run / "last.ckpt")
    about = {name: checkpoint[name] for name in ("hyper_parameters", "images")}
    name = f"digits-{about['hyper_parameters']['attention']}"
    target = Path(softmaxfree.__file__).parent / "weights" / f"{name}.safetensors"
    metadata = {"checkpoint": json.dumps(about, default=str)}
    write_atomically(target, save(in_half_precision(checkpoint), metadata))
    return target


def in_half_precision(checkpoint: dict[str, Any], without: str = "") -> dict[str, Tensor]:
    """The weights of a run's model.

    Args:
        checkpoint: The run's.
        without: A prefix to take off the names.
    """
    return {
        name.removeprefix(without): (
            tensor.half() if tensor.is_floating_point() else tensor
        ).contiguous()
        for name, tensor in checkpoint["state_dict"].items()
        if name.startswith("model.")
    }


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(f"written: {embed(Path(folder))}")
