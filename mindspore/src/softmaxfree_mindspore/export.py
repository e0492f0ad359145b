"""Writes a model as MindIR, for MindSpore Lite and for serving.

python -m softmaxfree_mindspore.export softpp_tiny tiny.mindir --weights tiny.safetensors
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

from .models.soft import SoftmaxFreeTransformer, create_model


def export(
    model: SoftmaxFreeTransformer, path: str | Path, size: Sequence[int], batch: int = 1
) -> None:
    """Writes a graph for images of one size, which is what MindIR's constants are for.

    Args:
        model: In evaluation mode afterwards.
        path: .mindir file to write.
        size: (height, width) of the images.
        batch: Images at a time.
    """
    if Path(path).suffix != ".mindir":
        raise ValueError(f"the file must end in .mindir, got {path}")
    images = Tensor(np.zeros((batch, model.in_chans, *size), np.float32))
    ms.export(model.set_train(False), images, file_name=str(path), file_format="MINDIR")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m softmaxfree_mindspore.export", description=__doc__.split("\n")[0]
    )
    parser.add_argument("name", help="a model, such as softpp_tiny")
    parser.add_argument("path", type=Path, help=".mindir file to write")
    parser.add_argument("--weights", type=Path, help=".safetensors file of softmaxfree's")
    parser.add_argument("--size", type=int, nargs="+", default=[224], help="side, or both sides")
    parser.add_argument("--batch", type=int, default=1, help="images at a time")
    parser.add_argument("--classes", type=int, default=1000, help="classes of the weights")
    given = parser.parse_args(arguments)
    model = create_model(given.name, given.weights, num_classes=given.classes)
    size = given.size * 2 if len(given.size) == 1 else given.size
    export(model, given.path, size, given.batch)
    print(f"wrote {given.path} for images of {size[0]} x {size[1]}")


if __name__ == "__main__":
    main()
