"""Weights to safetensors files that say which model they are of."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors.torch import save
from torch import Tensor

from ..allow_list import tasks
from ..errors import UserError
from ..files import check_folder_of, write_atomically
from ..trust import plain
from .build import build_model
from .checkpoints import is_released, matching, rename_released
from .variants import SIZES
from .weights import Weights, described, find_weights

_ANY = "tiny_fudan"
"""The variant that other sizes are arguments of."""


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

    def options(self) -> dict[str, Any]:
        """The arguments that are not those of the registered variant, or of tiny_fudan."""
        known = {
            "img_size": 224,
            "in_chans": 3,
            "num_classes": 1000,
            "num_heads": tuple(max(dim // 32, 1) for dim in self.arguments["embed_dims"]),
            "ratios": (8, 4, 2, 1),
            "value_conv": (9, 5, 3, 0),
            "stage4": "softmax" if (self.variant or _ANY).endswith("_fudan") else "soft",
            **SIZES[self.variant or _ANY],
        }
        return {key: value for key, value in self.arguments.items() if known[key] != value}

    def call(self, attention: str, path: Path) -> str:
        """The Python that builds the model and loads the file."""
        words = [f'"{attention}_{self.variant or _ANY}"', f'checkpoint_path="{path}"']
        words += [f"{key}={value!r}" for key, value in self.options().items()]
        return f"timm.create_model({', '.join(words)})"


def convert(source: str | Path, target: Path, attention: str = "soft") -> Found | None:
    """Writes weights to a .safetensors file that says which model they are of.

    Args:
        source: As `find_weights` takes them; tensors alone must be of SOFT or SOFT++, under this
            package's names or the authors'.
        target: The file.
        attention: `soft` or `softpp`, for tensors alone, which do not tell.

    Returns:
        What the shapes of tensors alone tell; None if the weights say which model they are of.
    """
    if target.suffix != ".safetensors":
        raise UserError(f"the converted file must end in .safetensors, got {target}")
    check_folder_of(target)
    weights, found = find_weights(source), None
    if weights.task is None:
        with matching(source):
            found = examine(weights.state, source)
        weights = _recognised(weights, found, attention)
    metadata = {"format": "pt"}
    if weights.task is not None:
        told, _ = plain(weights.told["hyper_parameters"], tasks()[weights.task], "")
        about = {"hyper_parameters": told, weights.entry: weights.entries()}
        metadata["checkpoint"] = json.dumps(about)
    prefix = "model." if weights.task == "Classification" else ""  # timm's names
    tensors = {key.removeprefix(prefix): x.contiguous() for key, x in weights.state.items()}
    write_atomically(target, save(tensors, metadata=metadata))
    return found


def _recognised(weights: Weights, found: Found, attention: str) -> Weights:
    """Tensors alone with the model that their shapes tell, or alone again if they do not fit it."""
    name = f"{attention}_{found.variant or _ANY}"
    cfg = timm.get_pretrained_cfg(name)
    assert cfg is not None
    state = rename_released(weights.state) if found.released else weights.state
    options = {key: value for key, value in found.options().items() if key != "num_classes"}
    told = {**cfg.to_dict(), "num_classes": found.arguments["num_classes"]}
    if isinstance(size := found.arguments["img_size"], int):
        told["input_size"] = (3, size, size)
    known = described(weights.source, state, name, told, options)
    alone = replace(weights, state=state)
    try:
        with torch.device("meta"):
            expected = build_model(*known.config()).state_dict()
    except Exception:  # whatever strange shapes make torch raise
        return alone
    shapes, own = ({key: x.shape for key, x in one.items()} for one in (expected, state))
    return known if shapes == own else alone


def convert_released(
    source: str, target: Path, attention: Literal["soft", "softpp"] = "soft"
) -> None:
    """Write weights to a .safetensors file that says which model they are of.

    All commands that take weights take the file, and timm.create_model(..., checkpoint_path=...)
    does. Nothing in the source is run. Of a released checkpoint sizes and depths are read from the
    shapes, and averaged weights (EMA) are preferred.

    Args:
        source: A run's folder or checkpoint, the authors' .pth file, or other weights
            (docs/weights.md).
        target: The .safetensors file to write.
        attention: Attention that released weights were trained with; their file does not say.
    """
    found = convert(source, target, attention)
    if found is None:
        print(f"written: {target}; predict, validate, export and fit take it")
        return
    names = "the authors' names" if found.released else "this package's names"
    print(f"{source}: {found.parameters:,} parameters under {names}")
    for name, value in found.arguments.items():
        print(f"  {name}: {value}")
    known = found.variant
    print(f"  that is {attention}_{known}" if known else "  no registered variant has these sizes")
    if find_weights(target).task is None:
        print("  shapes do not tell all of its arguments: the file holds tensors alone")
    print(f"written: {target}; load it with\n  {found.call(attention, target)}")


def examine(state: Mapping[str, Tensor], source: str | Path) -> Found:
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
