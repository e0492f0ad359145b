"""The configuration of a command: --config, a checkpoint's own, or the recipe for digits."""

import sys
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint_files import LAST, holds_run, sound_checkpoint
from ..errors import UserError, visible
from ..files import recipe
from ..imports import listed
from ..models.checkpoints import read_run_checkpoint
from ..models.weights import find_weights
from ..trust import configuration, read_yaml


def with_configuration(command: str, arguments: list[str]) -> list[str]:
    """The arguments, with a --config if they have none: the checkpoint's, or that for digits.

    A damaged last.ckpt is replaced by the checkpoint before it.
    """
    path = _option(arguments, "--checkpoint")
    if path and path != "last":
        if not _is_run(Path(path)):
            return _scoring(path, command, arguments)
        sound = str(sound_checkpoint(Path(path) / LAST if Path(path).is_dir() else Path(path)))
        words = {path: sound, f"--checkpoint={path}": f"--checkpoint={sound}"}
        path, arguments = sound, [words.get(word, word) for word in arguments]
    if any(word.split("=")[0] in ("--config", "-c", "--help", "-h") for word in arguments):
        return arguments
    if path and path != "last":
        return ["--config", _configuration_of(Path(path), command, arguments), *arguments]
    if command != "fit":
        raise UserError(
            f"{command} needs something to score: give --checkpoint FILE, or --config FILE"
        )
    return ["--config", str(recipe("digits/softpp_nano.yaml")), *arguments]


def _is_run(path: Path) -> bool:
    """Whether a path is a checkpoint, or a folder with one."""
    return path.suffix == ".ckpt" or (path.is_dir() and holds_run(path))


def _scoring(source: str, command: str, arguments: list[str]) -> list[str]:
    """The arguments that score weights without a run, with their own model and preparation."""
    weights = find_weights(source)
    if command == "fit":
        raise UserError(
            f"{source} is no checkpoint of a run, which alone can go on: start a new run from it "
            f"with --model.init_checkpoint {source}"
        )
    backbone, num_classes = weights.config()
    model = {"backbone": backbone.name, "num_classes": num_classes, "init_checkpoint": source}
    model |= {name: getattr(backbone, name) for name in ("attention", "tie_qk", "options")}
    data: dict[str, Any] = {**vars(weights.preparation)}
    place = next(i for i, word in enumerate(arguments) if word.split("=")[0] == "--checkpoint")
    words = arguments[:place] + arguments[place + (1 if "=" in arguments[place] else 2) :]
    configs = [i for i, word in enumerate(words) if word.split("=")[0] in ("--config", "-c")]
    if not configs and not any(word.startswith(("--data.root", "--data.name")) for word in words):
        raise UserError(f"{source} does not say which images to score: give --data.root FOLDER")
    if not configs and _option(words, "--data.name") is None:
        data["name"] = ""  # image folders
    parts = {"tasks.Classification": model, "data.ImageData": data}
    config = {
        section: {"class_path": f"softmaxfree.{name}", "init_args": given}
        for section, (name, given) in zip(("model", "data"), parts.items())
    }
    after = configs[-1] + (1 if "=" in words[configs[-1]] else 2) if configs else 0
    return [*words[:after], "--config", yaml.safe_dump(config), *words[after:]]


def _option(arguments: list[str], name: str) -> str | None:
    for word, following in zip(arguments, [*arguments[1:], ""]):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _configuration_of(path: Path, command: str, arguments: list[str]) -> str:
    """The plain values of a checkpoint's configuration, as YAML. Nothing in the file is run."""
    text = read_run_checkpoint(path).get("config")
    if not isinstance(text, str):
        raise UserError(f"{path} does not say how it was trained: give its --config")
    config = read_yaml(text, path)
    own = listed(config.pop("modules", None))
    if own and not any(word.startswith("--modules") for word in arguments):
        raise UserError(
            f"{path} was trained with modules of your own, which are not imported because a file "
            f"names them: give --modules [{','.join(map(str, own))}]"
        )
    taken, left = configuration(config, path, command, arguments)
    if left:
        print(f"not taken from {path}: {visible(', '.join(left))}", file=sys.stderr)
    return yaml.safe_dump(taken)
