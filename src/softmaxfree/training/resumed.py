"""Which options of a run may change when it is resumed."""

import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..allow_list import either, is_number, is_switch, is_text, several
from ..errors import UserError
from ..models.checkpoints import read_run_checkpoint
from ..trust import read_yaml

LENGTH = ("trainer.max_epochs", "trainer.max_steps")
"""The length of the run, which may be raised. The learning rate keeps its schedule."""
MAY_CHANGE = (
    "modules",
    "save_every",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "trainer.log_every_n_steps",
    "trainer.logger",
    "trainer.max_time",
    "trainer.num_nodes",
    "trainer.num_sanity_val_steps",
    "trainer.strategy",
    "data.eval_batch_size",
    "data.eval_sizes",
    "data.num_workers",
    "data.root",
)
"""Where the run takes place and what it displays. All other options define the run."""

STATE = (
    "state_dict", "optimizer_states", "lr_schedulers", "epoch_progress",
    "epoch_loop.batch_progress", "RunCheckpoint",
)  # fmt: skip
AVERAGE = ("averaging_state", "current_model_state", "MovingAverage")
"""The parts of a run's state, and those of an average of the weights; loops and callbacks by
their own names."""


def resumption(path: Path, given: str) -> dict[str, Any]:
    """The checkpoint's file and step, and the options that have changed since.

    Args:
        path: The checkpoint.
        given: The configuration of the resumed run, as YAML.

    Raises:
        UserError: If an option has changed that defines the run.
    """
    checkpoint = read_run_checkpoint(path)
    told, now = checkpoint.get("config"), yaml.safe_load(given)
    changed = changes(read_yaml(told, path), now) if isinstance(told, str) else {}
    refused = [
        f"--{name} {_short(was)} (given: {_short(now)})" for name, (was, now) in _refused(changed)
    ]
    if refused:
        raise UserError(
            f"a resumed run keeps its options, and {path} was trained with {', '.join(refused)}; "
            "give the same, or start a new run from its weights with "
            f"--model.init_checkpoint {path} and another --out"
        )
    averaged = now.get("model", {}).get("init_args", {}).get("ema") is not None
    state = {**checkpoint, **checkpoint.get("callbacks", {})}
    if isinstance(loop := checkpoint.get("loops", {}).get("fit_loop"), dict):
        state |= loop
    if missing := [name for name in STATE + AVERAGE * averaged if not state.get(name)]:
        raise UserError(
            f"{path} has no {', '.join(missing)}, without which a run cannot go on: it is damaged; "
            f"start a new run from its weights with --model.init_checkpoint {path}"
        )
    changed = {name: [_plain(was), now] for name, (was, now) in changed.items()}
    return {"from": path.name, "step": checkpoint.get("global_step"), "changed": changed}


def changes(told: dict[Any, Any], given: dict[Any, Any]) -> dict[str, list[Any]]:
    """[before, now] by name, for all options that both configurations have and that differ."""
    before, now = dict(_flat(told)), dict(_flat(given))
    return {
        name: [before[name], now[name]]
        for name in before
        if name in now and before[name] != now[name]
    }


def _refused(changed: dict[str, list[Any]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, (was, now) in changed.items():
        raised = name in LENGTH and _limit(now) > _limit(was)
        if name not in MAY_CHANGE and not raised:
            yield name, (was, now)


def _limit(value: Any) -> float:
    return float(value) if is_number(value) and value != -1 else float("inf")


def _short(value: Any) -> str:
    """A value for a message: a file may have any, of any length."""
    return str(_plain(value))[:200]


def _plain(value: Any) -> Any:
    """Numbers, texts and lists of them as they are; of other values the beginning, as text."""
    plain = either(is_number, is_switch, is_text, lambda value: value is None)
    return value if either(plain, several(plain))(value) else reprlib.repr(value)[:1000]


def _flat(config: dict[Any, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Values by their names on the command line; a class by the name of its section."""
    for key, value in config.items():
        if isinstance(value, dict) and (key == "init_args" or not section):
            yield from _flat(value, section or key)
        else:
            name = section if key == "class_path" else f"{section}.{key}".lstrip(".")
            yield name, None if value in ({}, []) else value
