"""Applies the allow-list to files that anybody may have written.

A checkpoint carries its model's arguments and its run's configuration. Numbers, switches, names of
models and folders below the current one are taken from there. Classes, functions, addresses,
absolute paths, and data names that say how data is fetched come from the command line alone.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch import Tensor, nn

from .allow_list import DATA, PREPARATION, TRAINER, Table, is_number, tasks
from .errors import UserError, visible

Model = TypeVar("Model", bound=nn.Module)

LONGEST_TEXT = 2**20
"""The most characters of a configuration."""
WEIGHTS = frozenset(
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
)
"""Options that say where a model's first weights come from; a checkpoint has its own weights."""
_NEEDLESS = {"model.init_checkpoint", "data.download"}
"""Used at the start of a run alone."""
_OF_TRAINING = {"model.teacher", "model.results"}
"""Needed to train, but not to score."""


def plain(values: Mapping[Any, Any], table: Table, prefix: str) -> tuple[dict[str, Any], list[str]]:
    """The values of a mapping that the table allows, and the names of all others.

    None is always allowed.

    Args:
        values: As the file has them.
        table: The allow-list.
        prefix: What the names of the others begin with, such as "model.".
    """
    taken: dict[str, Any] = {}
    others: list[str] = []
    for name, value in values.items():
        kind = table.get(name)
        if isinstance(kind, Mapping) and isinstance(value, Mapping):
            taken[name], inner = plain(value, kind, f"{prefix}{name}.")
            others += inner
        elif kind and (value is None or (callable(kind) and kind(value))):
            taken[name] = value
        elif isinstance(value, Tensor) or value not in (None, False, [], {}):
            others.append(f"{prefix}{name}")
    return taken, others


def model_arguments(task: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a checkpoint's model.

    Args:
        task: Name of the task that trained it.
        given: The checkpoint's hyper_parameters.
        names: The arguments that are wanted.

    Raises:
        UserError: If one of them is not on the list.
    """
    given = given if isinstance(given, Mapping) else {}
    if given.get("num_classes") is None:
        raise UserError("the checkpoint has no num_classes: it is damaged")
    if "backbone" in names and not isinstance(given.get("backbone"), str):
        raise UserError("the checkpoint has no backbone: it is damaged")
    wanted = {name: given[name] for name in names if name in given}
    taken = _refusing(wanted, tasks()[task], "the model")
    if "backbone" in taken:  # without its tag, which names other weights
        taken["backbone"] = taken["backbone"].partition(".")[0]
    return taken


def preparation(given: Any, num_classes: int, *needed: str) -> dict[str, Any]:
    """The preparation of images and the names of classes in a checkpoint."""
    found = _refusing(given, PREPARATION, "images") if isinstance(given, Mapping) else {}
    for name in ("classes", "palette"):
        if found.get(name) is not None and len(found[name]) != num_classes:
            raise UserError(
                f"the checkpoint has {len(found[name])} {name} for num_classes={num_classes}: it "
                "is damaged"
            )
    if missing := [name for name in needed if found.get(name) is None]:
        raise UserError(
            f"the checkpoint has no {', '.join(missing)}: it is damaged, or not one that "
            "`softmaxfree fit` has written"
        )
    return found


def built(make: Callable[[], Model], state: Any) -> Model:
    """A model with a checkpoint's weights, in evaluation mode.

    The model is first built without memory, and refused if its parameters and buffers are many
    more numbers than are stored. Tensors may share what is stored, which counts once.

    Args:
        make: Builds the model.
        state: The weights.
    """
    try:
        with torch.device("meta"):
            large = make()
        told = sum(tensor.numel() for tensor in (*large.parameters(), *large.buffers()))
        own = {tensor.untyped_storage().data_ptr(): tensor for tensor in state.values()}
        stored = sum(x.untyped_storage().nbytes() // x.element_size() for x in own.values())
        if told > 2 * stored + 2**20:
            raise UserError(
                f"the checkpoint describes a model of {told:,} numbers, but has {stored:,}: it is "
                "damaged"
            )
        model = make()
        model.load_state_dict(state)
    except UserError:
        raise
    except Exception as error:  # whatever wrong values make torch and timm raise
        reason = str(error).strip().split("\n")[0][:300].rstrip(".:")
        raise UserError(
            f"no model can be built from the checkpoint ({type(error).__name__}: "
            f"{reason}): it is damaged, or not one that `softmaxfree fit` has written"
        ) from error
    return model.eval()


def _refusing(given: Mapping[Any, Any], table: Table, what: str) -> dict[str, Any]:
    taken, others = plain(given, table, "")
    if refused := [name for name in others if name.rpartition(".")[2] not in WEIGHTS]:
        raise UserError(
            f"the checkpoint sets {visible(', '.join(refused))} of {what}, which "
            f"{'are' if len(refused) > 1 else 'is'} not taken from a file: only plain values of "
            "known options are"
        )
    return taken


def read_yaml(text: str, path: Path) -> dict[Any, Any]:
    """A run's configuration; raises UserError if the text is not a YAML mapping.

    Args:
        text: The configuration.
        path: The checkpoint or other file that it is from, for messages.
    """
    try:
        if len(text) > LONGEST_TEXT:
            raise ValueError("too long")
        config = yaml.load(text, _WithoutAnchors)
        if not isinstance(config, dict):
            raise ValueError("no mapping")
    except Exception as error:  # whatever yaml's constructors raise for wrong values
        raise UserError(
            f"the configuration in {path} cannot be read: it is damaged, or not one that "
            "`softmaxfree fit` has written"
        ) from error
    return config


class _WithoutAnchors(yaml.SafeLoader):
    """Refuses anchors and their aliases: a short text could stand for a mapping without end."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.peek_event().anchor is not None:
            raise ValueError("an anchor or an alias")
        return super().compose_node(parent, index)


def configuration(
    config: Mapping[Any, Any], path: Path, command: str, arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The allowed part of a checkpoint's configuration, and the names that are left out.

    Args:
        config: The configuration in the checkpoint.
        path: The checkpoint, for messages.
        command: fit, validate or test.
        arguments: The command line, which may set options that are not on the list.

    Raises:
        UserError: If options have to be given again on the command line.
    """
    top: Table = {"seed_everything": is_number, "save_every": is_number, "trainer": TRAINER}
    parts = {"model": ("softmaxfree.tasks", tasks()), "data": ("softmaxfree.data", DATA)}
    taken, others = plain({k: v for k, v in config.items() if k not in parts}, top, "")
    if command != "fit":  # scoring runs on whatever machine this is
        taken.pop("save_every", None)
        for name in ("devices", "num_nodes", "strategy"):
            taken.get("trainer", {}).pop(name, None)
    for part, (package, known) in parts.items():
        taken[part], inner = _allowed_part(config.get(part), package, known, part, path)
        others += inner
    needless = _NEEDLESS | {f"model.options.{name}" for name in WEIGHTS}
    others = [name for name in others if name not in needless and not _is_given(name, arguments)]
    left = [
        name
        for name in others
        if command != "fit" and (name in _OF_TRAINING or name.startswith("trainer."))
    ]
    if again := [f"--{name}" for name in others if name not in left]:
        raise UserError(
            f"{path} was trained with {visible(' and '.join(again[:6]))}, which "
            f"{'are' if len(again) > 1 else 'is'} not taken from a file: give "
            f"{'them' if len(again) > 1 else 'it'} again, or the run's --config if you trust it"
        )
    return taken, left


def _allowed_part(
    given: Any, package: str, known: Mapping[str, Table], part: str, source: Path
) -> tuple[dict[str, Any], list[str]]:
    """The class and the allowed arguments of a part, and the names of all other arguments."""
    given = given if isinstance(given, Mapping) else {}
    path = str(given.get("class_path"))
    name = path.rpartition(".")[2]
    extra = set(given) - {"class_path", "init_args"}
    if name not in known or extra or not re.fullmatch(rf"{re.escape(package)}(\.\w+)?\.\w+", path):
        raise UserError(
            f"the {part} of {source} is a {visible(path)[:100]}, which is not built because a file "
            "names it: give the run's --config if you trust it"
        )
    arguments = given.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        arguments = {"init_args": arguments}
    taken, others = plain(arguments, known[name], f"{part}.")
    return {"class_path": f"{package}.{name}", "init_args": taken}, others


def _is_given(name: str, arguments: Sequence[str]) -> bool:
    """Whether the command line sets an option, a part of it, or a mapping that contains it."""
    first, *middle = name.split(".")[:-1] or [name]
    above = [".".join([first, *middle[: i + 1]]) for i in range(len(middle))]
    options = [
        word[2:].partition("=")[0].replace(".init_args.", ".", 1)
        for word in arguments
        if word.startswith("--")
    ]
    return any(
        option in (name, *above) or option.startswith((f"{name}.", f"{name}+"))
        for option in options
    )
