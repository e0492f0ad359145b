"""A resumed run is the run it was: what may change in its configuration, and what is refused."""

import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from ..tasks.predict import read_run_checkpoint
from ..trust import either, is_number, is_switch, is_text, read_yaml, several

LENGTH = ("trainer.max_epochs", "trainer.max_steps")
"""How far it goes: may be raised. The learning rate keeps the schedule that it has."""
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
"""Where it runs and what it shows. All else is the run itself."""


def resumption(path: Path, given: str) -> dict[str, Any]:
    """What run.json tells of going on from a checkpoint: its file, its step and what has changed.

    Args:
        path: The checkpoint.
        given: The configuration, as YAML, that the run is to go on with.
    """
    checkpoint = read_run_checkpoint(path)
    told = checkpoint.get("config")
    changed = changes(read_yaml(told, path), yaml.safe_load(given)) if isinstance(told, str) else {}
    refused = [
        f"--{name} {_short(was)} (given: {_short(now)})" for name, (was, now) in _refused(changed)
    ]
    if refused:
        raise UserError(
            f"a run goes on as what it was, and {path} is of one with {', '.join(refused)}; "
            f"give that, or start a new run from its weights with --model.init_from {path} and "
            "another --out"
        )
    changed = {name: [_plain(was), now] for name, (was, now) in changed.items()}
    return {"from": path.name, "step": checkpoint.get("global_step"), "changed": changed}


def changes(told: dict[Any, Any], given: dict[Any, Any]) -> dict[str, list[Any]]:
    """[before, now] by name, of all that both configurations have."""
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
    """For a message; a file may have any value, of any length."""
    return str(_plain(value))[:200]


def _plain(value: Any) -> Any:
    """A value of a file, or the beginning of one that is neither a number nor a text, nor some."""
    plain = either(is_number, is_switch, is_text, lambda value: value is None)
    return value if either(plain, several(plain))(value) else reprlib.repr(value)[:1000]


def _flat(config: dict[Any, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Values by the names that they have on the command line; a class by its section's."""
    for key, value in config.items():
        if isinstance(value, dict) and (key == "init_args" or not section):
            yield from _flat(value, section or key)
        else:
            name = section if key == "class_path" else f"{section}.{key}".lstrip(".")
            yield name, None if value in ({}, []) else value
