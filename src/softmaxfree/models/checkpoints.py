"""Weights from files: read safely, renamed from the authors' names, resized, checked."""

import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import load_state_dict
from torch import Tensor, nn

from ..checkpoint_files import damage, sound_checkpoint
from ..errors import UserError

StateDict = dict[str, Tensor]

_RELEASED = re.compile(r"(patch_embed\d\.proj|pos_embed\d$|block\d\.\d+\.)")
_MODULES = {
    "att.mha.W_q": "attention.q",
    "att.mha.W_v": "attention.v",
    "att.mha.ff": "attention.proj",
    "att.mha.attn.Qlandmark_op": "attention.sampler",
    "att.mha.attn.Qnorm_act": "attention.landmark_norm",
    "att.mha.attn.conv": "attention.value_conv",
    "att.norm1": "norm1",
    "att.norm2": "norm2",
    "att.ff1": "mlp.fc1",
    "att.ff2": "mlp.fc2",
    "attn.q": "attention.q",
    "attn.proj": "attention.proj",
}
"""Modules of a block: the authors' names and ours, where they differ."""


@contextmanager
def matching(source: str | Path) -> Iterator[None]:
    """Turns whatever is raised while a file's tensors are matched by name into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever strange names and shapes make torch raise
        raise UserError(
            f"the tensors of {source} do not have the shapes that belong to their names "
            f"({type(error).__name__}: {str(error)[:200]}): the file is damaged"
        ) from error


def checkpoint_filter_fn(state_dict: Mapping[str, Tensor], model: nn.Module) -> StateDict:
    """Renames the authors' weights and resizes position embeddings to the model's grids."""
    state = rename_released(state_dict) if is_released(state_dict) else dict(state_dict)
    for name, parameter in model.named_parameters():
        if name.endswith("position.grid") and name in state and state[name].ndim == 4:
            state[name] = resize_grid(state[name], parameter.shape[1], parameter.shape[2])
    return state


def is_released(state_dict: Mapping[str, Any]) -> bool:
    """Tells whether the names are those of the authors' checkpoints."""
    return "pos_embed1" in state_dict and "patch_embed1.proj.0.weight" in state_dict


def rename_released(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Gives every tensor of a released checkpoint the name it has here."""
    state: StateDict = {}
    for key, tensor in state_dict.items():
        state |= _renamed(key, tensor)
    return state


def _renamed(key: str, tensor: Tensor) -> StateDict:
    if key == "cls_token":
        return {"stages.3.cls_token": tensor}
    if not (found := _RELEASED.match(key)):
        return {key: tensor}
    stage = f"stages.{int(re.findall(r'[0-9]', found[0])[0]) - 1}"
    if key.startswith("pos_embed"):
        prefix = tensor.shape[1] - math.isqrt(tensor.shape[1]) ** 2
        state = {f"{stage}.position.grid": square_grid(tensor[:, prefix:])}
        return state | ({f"{stage}.position.prefix": tensor[:, :prefix]} if prefix else {})
    parts = key.split(".")
    if key.startswith("patch_embed"):  # patch_embed1.proj.4.weight: the second unit's norm
        unit, layer = divmod(int(parts[2]), 3)
        return {f"{stage}.embed.{unit}.{'bn' if layer else 'conv'}.{parts[3]}": tensor}
    block, (module, leaf) = f"{stage}.blocks.{parts[1]}", ".".join(parts[2:]).rsplit(".", 1)
    if module == "attn.kv":
        k, v = tensor.chunk(2)
        return {f"{block}.attention.k.{leaf}": k, f"{block}.attention.v.{leaf}": v}
    for theirs, ours in _MODULES.items():
        if module == theirs or module.startswith(f"{theirs}."):
            module = ours + module.removeprefix(theirs)
            break
    return {f"{block}.{module}.{leaf}": tensor}


def square_grid(tokens: Tensor) -> Tensor:
    """(1, N, C) -> (1, H, W, C) with H = W."""
    side = math.isqrt(tokens.shape[1])
    if side * side != tokens.shape[1]:
        raise UserError(
            f"position embeddings of a checkpoint must be those of a square image, "
            f"got {tokens.shape[1]} positions"
        )
    return tokens.unflatten(1, (side, side))


def resize_grid(grid: Tensor, height: int, width: int, always: bool = False) -> Tensor:
    """Resizes positions bilinearly: (1, H, W, C) -> (1, height, width, C)."""
    if not always and grid.shape[1:3] == (height, width):
        return grid
    wide = grid.float() if grid.dtype in (torch.float16, torch.bfloat16) else grid
    image = F.interpolate(wide.permute(0, 3, 1, 2), size=(height, width), mode="bilinear")
    return image.permute(0, 2, 3, 1).to(grid.dtype)


def check_state_dict(state: Mapping[str, Tensor], model: nn.Module, strict: bool) -> None:
    """Refuses weights that do not fit the model, and names them."""
    expected = model.state_dict()
    shapes = [
        f"{key} {tuple(state[key].shape)} in place of {tuple(tensor.shape)}"
        for key, tensor in expected.items()
        if key in state and state[key].shape != tensor.shape
    ]
    missing = [key for key in expected if key not in state] if strict else []
    unknown = [key for key in state if key not in expected] if strict else []
    if not shapes and not missing and not unknown:
        return
    wrong = [
        f"{title} {_some(keys)}"
        for title, keys in (
            ("missing:", missing),
            ("unknown:", unknown),
            ("of other shape:", shapes),
        )
        if keys
    ]
    raise UserError(
        f"these weights do not fit this {type(model).__name__}; {'; '.join(wrong)}; "
        f"{_advice(state, expected, len(missing))}"
    )


def _some(keys: list[str], shown: int = 3) -> str:
    more = f" and {len(keys) - shown} more" if len(keys) > shown else ""
    return ", ".join(keys[:shown]) + more


def _advice(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], missing: int) -> str:
    if missing == len(expected):
        return "they are those of another model"
    head = state.get("head.weight")
    if (
        head is not None
        and head.ndim
        and "head.weight" in expected
        and head.shape != expected["head.weight"].shape
    ):
        return f"build the model with num_classes={head.shape[0]}, or leave head.* out of the file"
    return "build the model with the arguments that `softmaxfree convert` prints for the file"


def read_checkpoint(path: Path) -> StateDict:
    """Reads the weights of a .pth or .safetensors file, the averaged ones if it has some.

    No code in the file is run. Names lose the prefix that parallel training gives them.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}; give the path of a checkpoint")
    if path.suffix == ".ckpt":
        path = sound_checkpoint(path)
    check_archive(path)
    if zipfile.is_zipfile(path) and (reason := damage(path)):  # of a run, whatever its name
        raise UserError(f"{path} cannot be read as weights ({reason}): it is damaged")
    try:
        state = load_state_dict(str(path), use_ema=True, weights_only=True)
        check_tensors(state)
    except Exception as error:  # whatever a broken file makes the readers raise
        raise _unreadable(path, "weights", error) from error
    foreign = [key for key, tensor in state.items() if not isinstance(tensor, Tensor)]
    if foreign or not state:
        raise UserError(
            f"{path} holds no state dict: {_some(foreign) or 'nothing'} is no tensor; "
            "save model.state_dict()"
        )
    return state


def _unreadable(path: Path, what: str, error: Exception) -> UserError:
    """Why a file is not read; without the readers' advice to run what is in it."""
    message = str(error)
    if found := re.search(r"[Uu]nsupported globals?: (?:GLOBAL )?([\w.]+)", message):
        return UserError(
            f"{path} is refused: besides tensors it names {found[1].rstrip('.')}, code that "
            "loading it would run; ask its author for the state dict alone, as .safetensors"
        )
    told = message and not isinstance(error, AttributeError | TypeError | UnpicklingError)
    told = told and "weights_only" not in message
    reason = f" ({message.splitlines()[0].rstrip('.')})" if told else ""
    return UserError(
        f"{path} cannot be read as {what}{reason}: it is truncated or damaged, or a file of "
        "another kind"
    )


_PARTS: dict[str, type] = {
    "state_dict": dict,
    "current_model_state": dict,
    "averaging_state": dict,
    "callbacks": dict,
    "loops": dict,
    "hyper_parameters": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "pytorch-lightning_version": str,
    "epoch": int,
    "global_step": int,
}
"""The parts of a run's checkpoint, and their types; Lightning relies on them."""


def check_parts(checkpoint: dict[str, Any]) -> None:
    """Raises ValueError if a part of a run's checkpoint is of another type than Lightning's."""
    for name, kind in _PARTS.items():
        if name in checkpoint and not isinstance(checkpoint[name], kind):
            raise ValueError(f"its {name} is a {type(checkpoint[name]).__name__}")
    for name in ("optimizer_states", "lr_schedulers", "callbacks"):
        parts = checkpoint.get(name, [])
        entries = parts.values() if isinstance(parts, dict) else parts
        if not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"its {name} hold other things than mappings")
    for name in ("state_dict", "current_model_state"):
        for key, value in checkpoint.get(name, {}).items():
            if not isinstance(key, str) or not isinstance(value, Tensor):
                raise ValueError(f"its {name} holds other things than named tensors")
    if not _VERSION.fullmatch(checkpoint.get("pytorch-lightning_version", "0")):
        raise ValueError("its version of Lightning is not a version")


_VERSION = re.compile(r"\d+(\.\w+){0,5}", re.ASCII)


def read_run_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a run's checkpoint, without running anything in it."""
    path = sound_checkpoint(path)
    check_archive(path)
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict):
            raise ValueError(f"it holds a {type(checkpoint).__name__}")
        check_parts(checkpoint)
        check_tensors(checkpoint)
    except Exception as error:  # whatever a broken file makes torch raise
        raise _unreadable(path, "a checkpoint", error) from error
    return checkpoint


def check_archive(path: Path) -> None:
    """Refuses a file that would be larger in memory than on the disk.

    torch.save does not compress its archives and writes nothing after their directory. A compressed
    one could be a thousand times as large in memory.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":  # no archive: a stream, whose sizes are what there is
            return
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 22, 0))
        ends = file.read().startswith(b"PK\5\6")
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        ends = False
    if not ends:
        raise UserError(
            f"{path} cannot be read as weights (it does not end with its directory); it is "
            "truncated, or no checkpoint: fetch it again"
        )
    inside = sum(record.file_size for record in records)
    if inside > size or any(record.compress_type for record in records):
        raise UserError(
            f"{path} is refused: it has {size / 1e6:,.1f} MB and would take {inside / 1e6:,.1f}, "
            "compressed, which a checkpoint never is; save it with torch.save"
        )


def check_tensors(value: Any) -> None:
    """Refuses a value with a tensor in it that is larger than its stored data."""
    seen: set[int] = set()
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor):
            plain = value.layout == torch.strided and value.device.type == "cpu"
            if not plain or value.untyped_storage().nbytes() < value.numel() * value.element_size():
                raise ValueError(f"a tensor of shape {tuple(value.shape)} is not stored as such")
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            rest += value.values() if isinstance(value, dict) else value
