"""The configuration of a command: --config, a checkpoint's own, or the recipe for digits."""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from os.path import isfile
from pathlib import Path
from typing import Any

import timm
import yaml
from jsonargparse import Namespace
from timm.data import resolve_data_config

from .. import data, tasks
from ..checkpoint_files import LAST, holds_run, sound_checkpoint
from ..data import ImageData
from ..data.images import BATCH
from ..data.sources import Source
from ..errors import UserError, user_file, visible
from ..files import recipe
from ..imports import listed
from ..models.checkpoints import read_run_checkpoint
from ..models.weights import find_weights, trained
from ..trust import configuration, read_yaml
from ..words import list_options, with_lists


def with_configuration(command: str, arguments: list[str]) -> list[str]:
    """The arguments, with a --config if they have none.

    It is the checkpoint's, or the recipe for the user's own images if there is a --data.root, or
    that for digits. Recipes are found by name from any folder. A damaged last.ckpt is replaced by
    the checkpoint before it.
    """
    arguments = _with_recipes(with_lists(arguments, _lists()))
    path = _option(arguments, "--checkpoint")
    if path and path != "last":
        if not _is_run(Path(path)):
            return _scoring(path, command, arguments)
        sound = str(sound_checkpoint(Path(path) / LAST if Path(path).is_dir() else Path(path)))
        words = {path: sound, f"--checkpoint={path}": f"--checkpoint={sound}"}
        path, arguments = sound, [words.get(word, word) for word in arguments]
    if any(word.split("=")[0] in ("--config", "-c", "--help_all") for word in arguments):
        return arguments
    if path and path != "last":
        return ["--config", _configuration_of(Path(path), command, arguments), *arguments]
    if command != "fit":
        raise UserError(
            f"{command} needs something to score: give --checkpoint FILE, or --config FILE"
        )
    if any(_option(arguments, f"--data.{name}") is not None for name in ("root", "name")):
        return ["--config", str(recipe("images/fine_tune")), *arguments]
    print(
        "no --data.root and no --config: the data is scikit-learn's handwritten digits",
        file=sys.stderr,
    )
    return ["--config", str(recipe("digits/softpp_nano")), *arguments]


def complete(config: Namespace, command: str) -> None:
    """Fills in what a classifier takes from its weights and its data, where nothing is given.

    Size, mean, std, crop and interpolation are those of the backbone's weights; the number of
    classes is the data's, and a batch has no more images than there are.
    """
    if config.data is None or config.data.class_path.rpartition(".")[2] != ImageData.__name__:
        return
    model, given = config.model.init_args, config.data.init_args
    for name, value in _preparation(model).items():
        if given.get(name) is None:
            given[name] = value
    images = ImageData(**given)
    given.name = images.dataset
    uncounted = "num_classes" in model and model.num_classes is None
    if command != "fit" or not (uncounted or given.get("batch_size") is None):
        return
    train = images.open("train")
    if given.get("batch_size") is None:
        most = min(len(train), BATCH) if isinstance(train, Source) else BATCH
        given.batch_size = 2 ** (most.bit_length() - 1)
    if uncounted:
        classes = getattr(train, "classes", None)
        if not classes:
            raise UserError(f"{images.dataset} does not name its classes: give --model.num_classes")
        model.num_classes = len(classes)


def _preparation(model: Namespace) -> dict[str, Any]:
    """Size, mean, std, crop_pct and interpolation of the weights' images, or of the backbone's."""
    if source := model.get("init_checkpoint"):
        with suppress(UserError):  # weights that do not say it, or that are gone
            return asdict(find_weights(source).preparation)
    name = model.get("backbone") or ""
    told = trained(name) or timm.get_pretrained_cfg(name.partition(".")[0])
    side = (model.get("options") or {}).get("img_size")
    found = resolve_data_config({"img_size": side}, told.to_dict() if told else {})
    names = ("mean", "std", "crop_pct", "interpolation")
    return {"size": found["input_size"][-1], **{name: found[name] for name in names}}


def _with_recipes(arguments: list[str]) -> list[str]:
    """The arguments, with the name of a recipe after --config replaced by its file."""
    found = list(arguments)
    for place, before, value in _configs(arguments):
        if ":" not in value and not isfile(value):
            found[place] = f"{before}{recipe(value)}"
    return found


def with_classes(arguments: list[str]) -> list[str]:
    """The arguments, with a class for each model and data of a --config that names none.

    It is that of the --config before, or else `Classification` and `ImageData`.
    """
    classes = {"model": "softmaxfree.tasks.Classification", "data": "softmaxfree.data.ImageData"}
    found = list(arguments)
    for place, before, value in _configs(arguments):
        config = _options_in(value)
        for section, usual in classes.items():
            given = config.get(section)
            if isinstance(given, dict) and not {"class_path", "init_args"} & given.keys():
                config[section] = {"class_path": usual, "init_args": given}
                found[place] = before + yaml.safe_dump(config)
            elif given:
                named = given.get("class_path", usual) if isinstance(given, dict) else given
                if not isinstance(named, str):
                    raise UserError(f"{section} in {value} must be options by name, got {named}")
                classes[section] = named
    return found


def _configs(arguments: list[str]) -> Iterator[tuple[int, str, str]]:
    """Of each --config: the place of the word with its value, that word's beginning, the value."""
    for place, (word, following) in enumerate(zip(arguments, [*arguments[1:], ""])):
        option, equals, value = word.partition("=")
        if option in ("--config", "-c"):
            yield (place, f"{option}=", value) if equals else (place + 1, "", following)


def _options_in(value: str) -> dict[str, Any]:
    """The options in a file of --config, or in YAML in its place."""
    name = value if isfile(value) else "--config"
    try:
        with user_file(name):
            config = yaml.safe_load(Path(value).read_text() if isfile(value) else value)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else ""
        raise UserError(f"{name} is not YAML; look for a mistake{line}") from error
    if not isinstance(config, dict):
        held = "nothing" if config is None else f"{config!s:.60}"
        raise UserError(f"{name} must hold options such as model: {{lr: 0.001}}, and holds {held}")
    return config


def _lists() -> set[str]:
    """The options of our tasks and data that take a list."""
    modules = {"--data.": data, "--model.": tasks}
    return {
        option
        for prefix, module in modules.items()
        for name in module.__all__
        for option in list_options(getattr(module, name), prefix)
    }


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


def place_of_mistake(message: str, arguments: list[str]) -> str:
    """ " in FILE" if a mistake is not on the command line but in a file of --config.

    Args:
        message: What jsonargparse says of it.
        arguments: The command line.
    """
    names = re.findall(r"(?:key \"|Option ')([^'\"]+)['\"]", message)
    last = names[-1].rpartition(".")[2] if names else None
    words = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    if last is None or last in [word.lstrip("-").rpartition(".")[2] for word in words]:
        return ""
    named = re.compile(rf"\b{re.escape(last)}\b")
    files = [value for _, _, value in _configs(arguments) if isfile(value)]  # not a checkpoint's
    found = [f" in {file}" for file in files if named.search(Path(file).read_text())]
    return found[-1] if found else ""


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
            f"names them: give --modules {' '.join(map(str, own))}"
        )
    taken, left = configuration(config, path, command, arguments)
    if left:
        print(f"not taken from {path}: {visible(', '.join(left))}", file=sys.stderr)
    return yaml.safe_dump(taken)
