"""What is on an image: a run's checkpoint, its preparation of images and its class names."""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ..data.transforms import evaluation_transform
from ..files import write_atomically
from ..models.build import build_model


class Predictor:
    """A trained model with what it needs to know about images.

    Args:
        path: A run's checkpoint; nothing in it is run.
        size: Side to resize images to; as in training if not given.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        checkpoint = read_run_checkpoint(path)
        arguments, images = checkpoint.get("hyper_parameters"), checkpoint.get("images")
        if not isinstance(arguments, dict) or not isinstance(images, dict):
            raise ValueError(
                f"{path} is no checkpoint of a classification run; "
                "give the last.ckpt that `softmaxfree fit` writes"
            )
        names = ("backbone", "num_classes", "attention", "tie_qk", "options")
        given: dict[str, Any] = {name: arguments.get(name) for name in names}
        self.model: nn.Module = build_model(**given)
        state = {
            name.removeprefix("model."): tensor for name, tensor in checkpoint["state_dict"].items()
        }
        self.model.load_state_dict(state)
        self.model.eval()
        self.classes: list[str] = images["classes"] or [
            str(number) for number in range(arguments["num_classes"])
        ]
        self.transform = evaluation_transform(
            size or images["size"],
            crop_pct=images["crop_pct"],
            interpolation=images["interpolation"],
            mean=tuple(images["mean"]),
            std=tuple(images["std"]),
        )

    @torch.inference_mode()
    def probabilities(self, path: Path) -> Tensor:
        """(classes) for one file."""
        try:
            with Image.open(path) as image:
                pixels: Tensor = self.transform(image.convert("RGB"))
        except Exception as error:  # whatever a broken file makes the decoders raise
            reason = "there is none" if not path.exists() else "it is none, or broken"
            raise ValueError(f"{path} cannot be read as an image: {reason}") from error
        logits: Tensor = self.model(pixels.unsqueeze(0))
        return logits.softmax(1)[0]

    def top(self, path: Path, count: int) -> list[dict[str, Any]]:
        """The most probable classes of one file, first the most probable."""
        values, numbers = self.probabilities(path).topk(min(count, len(self.classes)))
        return [
            {"class": self.classes[number], "index": number, "probability": value}
            for number, value in zip(numbers.tolist(), values.tolist())
        ]


def read_run_checkpoint(path: Path) -> dict[str, Any]:
    """A run's checkpoint, without running anything in it."""
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}; give the path of a run's last.ckpt")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken file makes torch raise
        reason = str(error).split("\n")[0].rstrip(".")
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({reason}): it is truncated, or none of a run"
        ) from error
    return checkpoint


def run(images: list[Path], ckpt: Path, top: int, size: int | None, target: Path | None) -> None:
    """Prints the most probable classes of each file, and writes them as JSON where asked."""
    if top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    predictor = Predictor(ckpt, size)
    found = {str(path): predictor.top(path, top) for path in images}
    for path, classes in found.items():
        print(path)
        for entry in classes:
            print(f"  {entry['probability'] * 100:6.2f} %  {entry['class']}")
    if target:
        write_atomically(target, json.dumps(found, indent=1) + "\n")
        print(f"written: {target}")
