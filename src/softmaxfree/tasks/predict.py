"""`softmaxfree predict`: classes, objects or labelled pixels of images, by a run's checkpoint."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from PIL import Image
from torch import Tensor

from ..checkpoint_files import sound_checkpoint
from ..data.image_files import check_resized, check_size, read_image
from ..data.transforms import evaluation_transform
from ..errors import UserError, user_file, visible
from ..files import write_atomically, write_picture
from ..imports import MODULES, Names, import_modules
from ..models.build import BackboneConfig, build_model
from ..models.checkpoints import check_archive, check_tensors
from ..trust import built, model_arguments, preparation
from .predict_labels import Labeller
from .predict_objects import ObjectFinder


class Classifier:
    """A trained classifier, and the preparation of its images.

    Args:
        checkpoint: A run's checkpoint.
        size: Side of images in pixels; as in training if not given.
    """

    def __init__(self, checkpoint: dict[str, Any], size: int | None = None) -> None:
        names = ("backbone", "num_classes", "attention", "tie_qk", "options")
        told = ("size", "mean", "std", "crop_pct", "interpolation")
        given = model_arguments("Classification", checkpoint["hyper_parameters"], names)
        num_classes = given.pop("num_classes")
        images = preparation(checkpoint["images"], num_classes, *told)
        backbone = BackboneConfig(given.pop("backbone"), **given)
        self.model = built(
            lambda: build_model(backbone, num_classes), _weights_of_model(checkpoint)
        )
        self.classes: list[str] = list(images.get("classes") or map(str, range(num_classes)))
        self.size = size or images["size"]
        self.mean, self.std = (torch.tensor(images[name]) for name in ("mean", "std"))
        self._crop_pct, self._interpolation = images["crop_pct"], images["interpolation"]

    def tensor(self, image: Image.Image, size: int | None = None) -> Tensor:
        """An image in RGB -> (1, 3, S, S), as the model takes it.

        Args:
            image: In RGB.
            size: The side S; the classifier's own if not given.
        """
        size = size or self.size
        check_resized(image, int(size / self._crop_pct))
        transform = evaluation_transform(
            size,
            crop_pct=self._crop_pct,
            interpolation=self._interpolation,
            mean=tuple(self.mean.tolist()),
            std=tuple(self.std.tolist()),
        )
        ready: Tensor = transform(image)
        return ready.unsqueeze(0)

    def seen(self, tensor: Tensor) -> Tensor:
        """The result of `tensor` as colours from 0 to 1: (1, 3, S, S) -> (S, S, 3)."""
        return (tensor[0].permute(1, 2, 0) * self.std + self.mean).clamp(0, 1)

    @torch.inference_mode()
    def probabilities(self, path: Path) -> Tensor:
        """Probabilities (classes) of one file."""
        logits: Tensor = self.model(self.tensor(read_image(path)))
        return logits.softmax(1)[0]

    def top(self, path: Path, count: int) -> list[dict[str, Any]]:
        """The most probable classes of one file, in descending order."""
        values, numbers = self.probabilities(path).topk(min(count, len(self.classes)))
        return [
            {"class": self.classes[number], "index": number, "probability": value}
            for number, value in zip(numbers.tolist(), values.tolist())
        ]


def _weights_of_model(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    state = checkpoint.get("state_dict")
    state = state if isinstance(state, dict) else {}
    return {str(name).removeprefix("model."): tensor for name, tensor in state.items()}


_PARTS: dict[str, type] = {
    "state_dict": dict,
    "current_model_state": dict,
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
    for name in ("state_dict", "current_model_state"):
        for key, value in checkpoint.get(name, {}).items():
            if not isinstance(key, str) or not isinstance(value, torch.Tensor):
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
        reason = str(error).split("\n")[0].rstrip(".")
        raise UserError(
            f"{path} cannot be read as a checkpoint ({reason}): it is truncated, or not of a run"
        ) from error
    return checkpoint


def predict(arguments: list[str]) -> None:
    """Parses the command line of `softmaxfree predict`."""
    parser = ArgumentParser(
        prog="softmaxfree predict",
        exit_on_error=False,
        allow_abbrev=False,
        description="Say what is on images, with a run's checkpoint; draw what a detector finds.",
    )
    # Without a type: jsonargparse requires UTF-8 of typed values, and file names may be anything.
    parser.add_argument("images", nargs="+", help="Image files.")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="Checkpoint of a run: last.ckpt or best.ckpt.",
    )
    parser.add_argument("--top", type=int | None, help="Number of classes to show; 5.")
    parser.add_argument("--threshold", type=float | None, help="Lowest score of an object; 0.5.")
    parser.add_argument(
        "--size", type=int | None, help="Side of images in pixels; as in training if not given."
    )
    parser.add_argument(
        "--out", type=Path | None, help="Folder for pictures of the objects; predictions."
    )
    parser.add_argument("--json", type=Path | None, help="File to write what was found to.")
    parser.add_argument("--modules", type=Names, help=MODULES)
    given = parser.parse_args(arguments)
    import_modules(given.modules)
    images = [Path(name) for name in given.images]
    run(images, given.checkpoint, given.top, given.size, given.json, given.threshold, given.out)


def run(
    images: list[Path],
    checkpoint: Path,
    top: int | None = None,
    size: int | None = None,
    target: Path | None = None,
    threshold: float | None = None,
    out: Path | None = None,
) -> None:
    """Says what is on each image: classes, objects or labels, as the checkpoint was trained.

    Args:
        images: Files of images.
        checkpoint: A run's checkpoint.
        top: Number of classes to show for each image.
        size: Side, for a detector the shorter one, to resize to; as in training if not given.
        target: File to write what was found to, as JSON.
        threshold: Lowest score of an object that is shown.
        out: Folder for drawings of the objects.
    """
    check_size(size)
    content = read_run_checkpoint(checkpoint)
    if not isinstance(content.get("hyper_parameters"), dict):
        content = {}
    if "images" in content:
        _refuse(checkpoint, "classes", {"--threshold": threshold, "--out": out})
        found = _classify(images, Classifier(content, size), 5 if top is None else top)
    elif "objects" in content:
        _refuse(checkpoint, "objects", {"--top": top})
        out = out or Path("predictions")
        target = target or out / "objects.json"
        found = _find(images, ObjectFinder(content, size), threshold, out)
    elif "labels" in content:
        _refuse(checkpoint, "classes of pixels", {"--top": top, "--threshold": threshold})
        found = _label(images, Labeller(content, size), out or Path("predictions"))
    else:
        raise UserError(
            f"{checkpoint} is no checkpoint that can predict; "
            "give the last.ckpt that `softmaxfree fit` writes"
        )
    if target:
        write_atomically(target, json.dumps(found, indent=1) + "\n")
        print(f"written: {target}")


def _refuse(checkpoint: Path, what: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{checkpoint} finds {what}, and takes no {name}: leave it out")


def _classify(images: list[Path], classifier: Classifier, top: int) -> dict[str, Any]:
    if top < 1:
        raise UserError(f"--top must be at least 1, got {top}")
    found = {str(path): classifier.top(path, top) for path in images}
    for path, classes in found.items():
        print(visible(path))
        for entry in classes:
            print(f"  {entry['probability'] * 100:6.2f} %  {visible(entry['class'])}")
    return found


def _find(
    images: list[Path], finder: ObjectFinder, threshold: float | None, out: Path
) -> dict[str, Any]:
    threshold = 0.5 if threshold is None else threshold
    if not 0 <= threshold <= 1:
        raise UserError(f"--threshold must be from 0 to 1, got {threshold}")
    everything = {}
    for path, name in _pictures(images, out).items():
        drawn, everything[str(path)] = finder.find(read_image(path), threshold)
        write_picture(out / f"{name}.png", drawn)
        count = len(everything[str(path)])
        print(f"{visible(path)}: {count} objects, drawn in {visible(out / name)}.png")
        for entry in everything[str(path)]:
            x, y, width, height = entry["bbox"]
            print(
                f"  {entry['score'] * 100:6.2f} %  {visible(entry['class']):16} "
                f"{width:.0f} x {height:.0f} pixels at {x:.0f}, {y:.0f}"
            )
    return everything


def _label(images: list[Path], labeller: Labeller, out: Path) -> dict[str, Any]:
    everything = {}
    for path, name in _pictures(images, out).items():
        image = read_image(path)
        labels = labeller.label(image)
        write_picture(out / f"{name}-labels.png", labels)
        write_picture(out / f"{name}.png", labeller.overlay(image, labels))
        everything[str(path)] = labeller.shares(labels)
        drawn = visible(out / name)
        print(f"{visible(path)}: drawn in {drawn}.png, classes in {drawn}-labels.png")
        for label, share in everything[str(path)].items():
            print(f"  {share * 100:6.2f} %  {visible(label)}")
    return everything


def _pictures(images: list[Path], out: Path) -> dict[Path, str]:
    """Names of the pictures: those of the files, with a number if the name is taken."""
    with user_file(out, "write to"):
        out.mkdir(parents=True, exist_ok=True)
    names: dict[Path, str] = {}
    for path in images:
        taken = path.stem in names.values()
        names.setdefault(path, f"{path.stem}-{len(names) + 1}" if taken else path.stem)
    return names
