"""Which weights: the one way to name trained weights, for every command that takes some.

`find_weights` takes

- a name with weights: `softpp_nano.cifar10`, `digits-softpp`, any of timm's (`resnet18.a1_in1k`)
- the folder of a run, or a checkpoint in it: `runs/mine`, `runs/mine/best.ckpt`
- a file that `softmaxfree convert` has written: `model.safetensors`
- tensors alone, to start training from: `SOFT_tiny.pth`
- a folder as timm writes it for the Hugging Face Hub: `local-dir:FOLDER`, `hf-hub:OWNER/NAME`

Nothing in a file is run. What a file tells about its model passes the allow-list (`trust.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
from safetensors import safe_open
from timm.models import PretrainedCfg
from torch import nn

from ..checkpoint_files import LAST, holds_run
from ..errors import UserError, user_file
from ..trust import LONGEST_TEXT, built, model_arguments, preparation
from .build import BackboneConfig, build_model
from .checkpoints import StateDict, read_checkpoint, read_run_checkpoint

PACKAGED: dict[str, Path] = {
    path.stem: path
    for path in sorted((Path(__file__).parents[1] / "weights").glob("*.safetensors"))
}
"""Names of the weights that come with the package, and their files."""

_TASKS = {"images": "Classification", "objects": "Detection", "labels": "Segmentation"}
"""The tasks whose checkpoints say how images are prepared, by the entry that says it."""


@dataclass(frozen=True)
class Preparation:
    """How a classifier's images are prepared; the names are those of `ImageData` and of timm."""

    size: int
    """Side in pixels."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop_pct: float
    """The fraction of the resized image's side that the crop keeps."""
    interpolation: str


@dataclass(frozen=True)
class Weights:
    """Trained weights and what is known about them, see `find_weights`."""

    source: str
    """As they were named: softpp_nano.cifar10, runs/mine."""
    state: StateDict
    """Tensors by the names that they have in the file."""
    task: str | None
    """Classification, Detection or Segmentation; None if the file does not tell."""
    told: Mapping[str, Any]
    """The file's `hyper_parameters` and `images`, `objects` or `labels`, none of them checked."""

    def arguments(self, *names: str) -> dict[str, Any]:
        """The arguments of the task with these names, as far as the file has them.

        Raises:
            UserError: If the file does not tell its model, or has values that are not allowed.
        """
        if self.task is None:
            raise UserError(
                f"{self.source} does not say which model its weights are of: give a run's folder "
                "or checkpoint, a name with weights such as softpp_nano.cifar10, or the file that "
                "`softmaxfree convert` makes of it"
            )
        return model_arguments(self.task, self.told["hyper_parameters"], names)

    @property
    def entry(self) -> str:
        """The entry of `told` that says how images are prepared."""
        return next(name for name, task in _TASKS.items() if task == self.task)

    def entries(self, *needed: str) -> dict[str, Any]:
        """How images are prepared, and the classes, by name; those that are needed are there."""
        count = self.arguments("num_classes")["num_classes"]
        return preparation(self.told[self.entry], count, *needed)

    @property
    def preparation(self) -> Preparation:
        """Of a classifier's images."""
        self._check_classifier()
        found = self.entries("size", "mean", "std", "crop_pct", "interpolation")
        return Preparation(
            found["size"], tuple(found["mean"]), tuple(found["std"]), found["crop_pct"],
            found["interpolation"],
        )  # fmt: skip

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; their numbers if the file has no names."""
        count = self.arguments("num_classes")["num_classes"]
        return tuple(self.entries().get("classes") or map(str, range(count)))

    def config(self, **options: Any) -> tuple[BackboneConfig, int]:
        """A classifier's backbone and number of classes.

        Args:
            options: Arguments of the backbone that replace those in the file.
        """
        self._check_classifier()
        given = self.arguments("backbone", "num_classes", "attention", "tie_qk", "options")
        given["options"] = {**(given.get("options") or {}), **options}
        num_classes = given.pop("num_classes")
        return BackboneConfig(given.pop("backbone"), **given), num_classes

    def build(self, **options: Any) -> nn.Module:
        """The classifier with its weights, in evaluation mode; arguments as of `config`."""
        backbone, num_classes = self.config(**options)
        state = {name.removeprefix("model."): tensor for name, tensor in self.state.items()}
        return built(lambda: build_model(backbone, num_classes), state)

    def _check_classifier(self) -> None:
        if self.task not in ("Classification", None):
            raise UserError(
                f"{self.source} is of {self.task.lower()}: give weights of a classifier of images"
            )


def find_weights(source: str | Path) -> Weights:
    """Finds trained weights by a name, a file or a folder; names come before paths.

    Raises:
        UserError: If there are none, or the file cannot be read as weights.
    """
    name, path = str(source), Path(source)
    if cfg := trained(name):
        return _of_timm(name, cfg)
    if name in PACKAGED:
        return _of_file(name, PACKAGED[name])
    scheme, _, place = name.partition(":")
    if scheme in ("hf-hub", "local-dir") and place:
        return _of_folder(name, Path(place) if scheme == "local-dir" else _fetched(place))
    if path.is_dir() and not holds_run(path):
        return _of_folder(name, path)
    if not path.exists() and path.suffix != ".ckpt":
        raise UserError(_unknown(name))
    return _of_file(name, path / LAST if path.is_dir() else path)


def trained(name: str) -> PretrainedCfg | None:
    """timm's configuration of a name with a tag, such as softpp_nano.cifar10, if it has weights."""
    if "." not in name or not timm.is_model(name):
        return None
    try:
        cfg = timm.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag
        return None
    return cfg if cfg and cfg.has_weights else None


def _of_timm(name: str, cfg: PretrainedCfg) -> Weights:
    if cfg.file:
        state = read_checkpoint(Path(cfg.file))
    else:
        try:
            state = timm.create_model(name, pretrained=True).state_dict()
        except Exception as error:  # whatever a failed download raises
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise UserError(
                f"timm cannot fetch the weights of {name} ({reason}): connect to the network, or "
                "give a file"
            ) from error
    return described(name, state, name.partition(".")[0], cfg.to_dict(remove_null=False), None)


def _of_file(name: str, path: Path) -> Weights:
    if path.suffix == ".ckpt":
        told = read_run_checkpoint(path)
        state = told["state_dict"] if "state_dict" in told else read_checkpoint(path)
        return _told(name, state, told)
    state, told = read_checkpoint(path), {}
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            told = _json((file.metadata() or {}).get("checkpoint", "{}"), path)
    return _told(name, state, told)


def _of_folder(name: str, folder: Path) -> Weights:
    """Of a folder with config.json and weights, as timm.models.save_for_hf writes it."""
    config, files = folder / "config.json", ("model.safetensors", "pytorch_model.bin")
    file = next((folder / file for file in files if (folder / file).is_file()), None)
    if file is None or not config.is_file():
        raise UserError(
            f"{name} holds no weights: give the folder of a run, with {LAST}, or one with "
            f"config.json and {' or '.join(files)}, as timm writes it"
        )
    with user_file(config):
        told = _json(config.read_text(errors="replace"), config)
    inner = told.get("pretrained_cfg")
    cfg = {**told, **(inner if isinstance(inner, dict) else {})}
    cfg |= {key: told[key] for key in ("num_classes", "label_names") if key in told}
    return described(
        name, read_checkpoint(file), told.get("architecture"), cfg, told.get("model_args")
    )


def _told(name: str, state: StateDict, told: Mapping[str, Any]) -> Weights:
    """Weights with what their file tells about them."""
    entry = next((entry for entry in _TASKS if entry in told), None)
    known = entry is not None and isinstance(told.get("hyper_parameters"), dict)
    return Weights(name, state, _TASKS[entry] if entry and known else None, told if known else {})


def described(
    name: str, state: StateDict, architecture: Any, cfg: Mapping[str, Any], options: Any
) -> Weights:
    """Weights of a classifier that timm's configuration describes."""
    size, labels = cfg.get("input_size"), cfg.get("label_names")
    images = {key: cfg.get(key) for key in ("mean", "std", "crop_pct", "interpolation")}
    images["size"] = size[-1] if isinstance(size, list | tuple) and size else None
    images["classes"] = labels if isinstance(labels, list | tuple) else None
    model = {"backbone": architecture, "num_classes": cfg.get("num_classes"), "options": options}
    return _told(name, state, {"hyper_parameters": model, "images": images})


def _fetched(place: str) -> Path:
    """The folder of a model of the Hugging Face Hub, OWNER/NAME or OWNER/NAME@REVISION."""
    from huggingface_hub import snapshot_download  # timm brings it; slow to import

    owner_name, _, revision = place.partition("@")
    wanted = ["config.json", "model.safetensors", "pytorch_model.bin"]
    try:
        return Path(snapshot_download(owner_name, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # of its own kinds, and of those of the network
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UserError(
            f"hf-hub:{place} cannot be fetched ({reason}): check the name and the network, or give "
            "local-dir:FOLDER"
        ) from error


def _json(text: str, path: Path) -> dict[str, Any]:
    try:
        told = json.loads(text) if len(text) <= LONGEST_TEXT else None
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise UserError(f"what {path} tells about its weights cannot be read: it is damaged")
    return told


def _unknown(name: str) -> str:
    """Why a name does not stand for weights."""
    if timm.is_model(name):
        found = timm.list_pretrained(f"{name.partition('.')[0]}.*")
        some = f"choose {' or '.join(found[:6])}" if found else "train it with `softmaxfree fit`"
        return (
            f"{name} is a model without trained weights: {some}, or give a run's folder or a file"
        )
    near = get_close_matches(name, [*PACKAGED, *timm.list_models("soft*")], n=3)
    hint = f"did you mean {' or '.join(near)}? Or give" if near else "give"
    kind = "is no file" if name.endswith((".pth", ".safetensors")) else "are no weights"
    return (
        f"there {kind} {name}: {hint} a name such as softpp_nano.cifar10, a run's folder "
        "or checkpoint, a .safetensors or .pth file, local-dir:FOLDER or hf-hub:OWNER/NAME"
    )
