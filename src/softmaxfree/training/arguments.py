"""The configuration of a command: --config, a checkpoint's own, or the recipe for digits."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import yaml

from ..checkpoint_files import sound_checkpoint
from ..errors import UserError, visible
from ..files import recipe
from ..imports import listed
from ..tasks.predict import read_run_checkpoint
from ..trust import configuration, read_yaml


def with_configuration(command: str, arguments: list[str]) -> list[str]:
    """The arguments, with a --config if they have none: the checkpoint's, or that for digits.

    A damaged last.ckpt is replaced by the checkpoint before it.
    """
    path = _option(arguments, "--checkpoint")
    if path and path != "last":
        sound = str(sound_checkpoint(Path(path)))
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
    return ["--config", str(recipe("digits/softpp_nano.yaml")), *arguments]


def place_of_mistake(message: str, arguments: list[str]) -> str:
    """ " in FILE" if a mistake is not on the command line but in a file of --config.

    Args:
        message: What jsonargparse says of it.
        arguments: The command line.

    Raises:
        UserError: If a file is not YAML.
    """
    names = re.findall(r"(?:key \"|Option ')([^'\"]+)['\"]", message)
    last = names[-1].rpartition(".")[2] if names else None
    words = [word.lstrip("-").partition("=") for word in arguments if word.startswith("--")]
    given = last is None or last in [word.rpartition(".")[2] for word, _, _ in words]
    values = [value for word, _, value in words if word == "config" and value]
    values += [value for word, value in pairwise(arguments) if word in ("--config", "-c")]
    place = ""
    for path in (Path(value) for value in values if "\n" not in value):  # not a checkpoint's
        if not path.is_file():
            continue
        try:
            text = path.read_text()
            yaml.safe_load(text)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f" in line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else ""
            raise UserError(f"{path} is not YAML; look for a mistake{line}") from error
        if not given and re.search(rf"\b{re.escape(last or '')}\b", text):
            place = f" in {path}"
    return place


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
