"""Released checkpoints to safetensors, and what their shapes tell about the model."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save
from torch import Tensor

from ..errors import UserError
from ..files import write_atomically
from .checkpoints import is_released, read_checkpoint, rename_released
from .variants import SIZES


@dataclass(frozen=True)
class Found:
    """A model as far as its weights tell."""

    released: bool
    arguments: dict[str, Any]
    """Of `SoftmaxFreeTransformer`."""
    parameters: int

    @property
    def variant(self) -> str | None:
        """The end of the names that are registered for these widths and depths."""
        for name, known in SIZES.items():
            same = all(tuple(known[key]) == self.arguments[key] for key in ("embed_dims", "depths"))
            if same and name.endswith("_fudan") == (self.arguments["stage4"] == "softmax"):
                return name
        return None

    def call(self, attention: str, path: Path) -> str:
        """The Python that builds the model and loads the file."""
        variant = self.variant or "tiny_fudan"
        known = {
            "img_size": 224,
            "in_chans": 3,
            "num_classes": 1000,
            "num_heads": tuple(max(dim // 32, 1) for dim in self.arguments["embed_dims"]),
            "ratios": (8, 4, 2, 1),
            "value_conv": (9, 5, 3, 0),
            "stage4": "softmax" if variant.endswith("_fudan") else "soft",
            **SIZES[variant],
        }
        words = [f'"{attention}_{variant}"', f'checkpoint_path="{path}"']
        words += [
            f"{key}={value!r}" for key, value in self.arguments.items() if known[key] != value
        ]
        return f"timm.create_model({', '.join(words)})"


def convert(source: Path, target: Path, attention: str = "soft") -> Found:
    """Writes the weights of a checkpoint under this package's names; says what they are of.

    Args:
        source: .pth or .safetensors file of the authors' or of this package.
        target: .safetensors file to write.
        attention: `soft` or `softpp`, which the weights do not tell; kept in the file.
    """
    if target.suffix != ".safetensors":
        raise UserError(f"the converted file must end in .safetensors, got {target}")
    state = read_checkpoint(source)
    found = examine(state, source)
    if is_released(state):
        state = rename_released(state)
    about = {
        "architecture": f"{attention}_{found.variant}" if found.variant else "",
        "model_args": json.dumps({"attention": attention, **found.arguments}),
    }
    tensors = {key: tensor.contiguous() for key, tensor in state.items()}
    write_atomically(target, save(tensors, metadata={"format": "pt", **about}))
    return found


def convert_released(
    source: Path, target: Path, attention: Literal["soft", "softpp"] = "soft"
) -> None:
    """Turn a released checkpoint into safetensors, and say what it holds.

    Sizes and depths are read from the shapes of its weights. Averaged weights (EMA) are preferred.
    Nothing in the file is run. timm.create_model(..., checkpoint_path=...) takes either file.

    Args:
        source: The authors' .pth file.
        target: The .safetensors file to write.
        attention: Attention that the weights were trained with; the file does not say.
    """
    found = convert(source, target, attention)
    names = "the authors' names" if found.released else "this package's names"
    print(f"{source}: {found.parameters:,} parameters under {names}")
    for name, value in found.arguments.items():
        print(f"  {name}: {value}")
    known = found.variant
    print(f"  that is {attention}_{known}" if known else "  no registered variant has these sizes")
    print(f"written: {target}; load it with\n  {found.call(attention, target)}")


def examine(state: Mapping[str, Tensor], source: Path) -> Found:
    """What the shapes in a checkpoint tell."""
    released = is_released(state)
    state = rename_released(state) if released else dict(state)
    expected = ["stages.0.embed.0.conv.weight", "stages.0.position.grid", "stages.3.cls_token"]
    if missing := [key for key in expected if key not in state]:
        some = ", ".join(list(state)[:3])
        raise UserError(
            f"{source} holds no pyramid of this family: it has {some} ... "
            f"and not {', '.join(missing)}; give a checkpoint of SOFT or SOFT++"
        )
    grids = [state[f"stages.{i}.position.grid"] for i in range(4)]
    dims = tuple(grid.shape[-1] for grid in grids)
    depths = tuple(_count(state, rf"stages\.{i}\.blocks\.(\d+)\.") for i in range(4))
    kernels, ratios, heads = [], [], []
    for i in range(4):
        prefix = f"stages.{i}.blocks.0.attention."
        conv = state.get(prefix + "value_conv.weight")
        window = state.get(prefix + "sampler.weight")
        norm = state.get(prefix + "landmark_norm.0.weight")
        kernels.append(0 if conv is None else conv.shape[-1])
        ratios.append(1 if window is None else window.shape[-1])
        if norm is not None:
            heads.append(dims[i] // norm.shape[0])
        else:  # softmax attention has no trace of its heads: as wide as before
            heads.append(max(1, dims[i] * heads[-1] // dims[i - 1]) if heads else 1)
    stage4 = "soft"
    if norm is None:
        stage4 = "softmax" if prefix + "k.weight" in state else "gaussian"
    stride = 4
    for known in SIZES.values():
        if (known["embed_dims"], known["depths"]) == (dims, depths):
            stride = known.get("stem_stride", 4)
    side = tuple(stride * length for length in grids[0].shape[1:3])
    arguments = {
        "img_size": side[0] if side[0] == side[1] else side,
        "in_chans": state["stages.0.embed.0.conv.weight"].shape[1],
        "num_classes": state["head.weight"].shape[0] if "head.weight" in state else 0,
        "embed_dims": dims,
        "depths": depths,
        "num_heads": tuple(heads),
        "ratios": tuple(ratios),
        "value_conv": tuple(kernels),
        "stage4": stage4,
    }
    convolved = "stages.0.blocks.0.attention.sampler.weight" in state
    if not convolved or (stage4 == "soft" and arguments["ratios"] == (8, 4, 2, 1)):
        del arguments["ratios"]  # not told by shapes, or those of 49 landmarks, the default
    learned = [v for k, v in state.items() if "running_" not in k and "num_batches" not in k]
    return Found(released, arguments, sum(math.prod(tensor.shape) for tensor in learned))


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    return len({found[1] for key in state if (found := re.match(pattern, key))})
