"""Checkpoints of strangers, with hostile values in any place, against every command that reads one.

A canary file appears if anything is run, imported, unpickled, fetched or written because a file
says so. It never may. SOFTMAXFREE_FUZZ_CASES sets the number of cases.
"""

import copy
import os
import pickle
import random
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from PIL import Image

from softmaxfree.deploy import export_checked
from softmaxfree.errors import UserError
from softmaxfree.lab.explore.view import available_models
from softmaxfree.lab.figures.heatmap import draw_heatmap as heatmap
from softmaxfree.lab.figures.subject import subjects
from softmaxfree.models.convert import convert
from softmaxfree.models.weights import find_weights
from softmaxfree.tasks.predict import run as predict
from softmaxfree.tasks.warm_start import initialise
from softmaxfree.training.command import run

from .records import record

CASES = int(os.environ.get("SOFTMAXFREE_FUZZ_CASES", "25"))
NUMBERS = [*map(int, os.environ.get("SOFTMAXFREE_FUZZ_NUMBERS", "").split())]
"""Cases to try again, by their numbers."""
ONCE_WRONG = (551,)
"""Cases that ended in a traceback: they are always tried."""

CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {
        "accelerator": "cpu", "max_steps": 1, "limit_val_batches": 1, "limit_test_batches": 1,
        "enable_progress_bar": False, "num_sanity_val_steps": 0,
    },
    "model": {
        "class_path": "softmaxfree.tasks.Classification",
        "init_args": {
            "options": {
                "embed_dims": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1],
            },
        },
    },
    "data": {
        "class_path": "softmaxfree.data.ImageData",
        "init_args": {"name": "digits", "size": 16, "batch_size": 4, "num_workers": 0,
                      "eval_sizes": [16]},
    },
}  # fmt: skip

EVIL = """
from pathlib import Path
Path({canary!r}).touch()
"""


class Attack:
    """Pickled, it calls what leaves the canary."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.canary),)


def payloads(canary: str) -> list[Any]:
    """Values that have been dangerous somewhere."""
    shell = f"touch {canary}"
    classes = [
        {"class_path": "evil.Thing"},
        {"class_path": "evil.Thing", "init_args": {"path": canary}},
        {"class_path": "lightning.pytorch.profilers.SimpleProfiler",
         "init_args": {"dirpath": ".", "filename": "canary"}},
        {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "canary"}},
        {"class_path": "lightning.pytorch.callbacks.LambdaCallback",
         "init_args": {"setup": "evil.call"}},
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
         "init_args": {"dirpath": "canary"}},
        {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", canary]}},
        {"class_path": "os.system", "init_args": {"command": shell}},
    ]  # fmt: skip
    sources: list[Any] = [
        {"checkpoint_path": "evil.pth"},
        {"pretrained": True, "pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/evil.pth"}},
        {"pretrained": True, "pretrained_cfg": {"file": "evil.pth"}},
        {"pretrained": True, "pretrained_cfg": "cifar10", "cache_dir": "canary"},
        {"features_only": True}, {"scriptable": True}, {"device": "cuda"},
        {"norm_layer": "evil.Norm"}, {"block_fn": {"class_path": "evil.Block"}},
        {"attention_options": {"class_path": "evil.Thing"}},
    ]  # fmt: skip
    words = [
        f"pipe:{shell}", f"pipe:{shell} |", f"|{shell}", f"$({shell})", f"`{shell}`", f"; {shell}",
        "evil", "evil.Thing", "evil.py", "evil.pth", "evil.yaml", "evil.ckpt", "file.ckpt",
        "wds/", "wds/x", "hfds/evil", "hfids/evil", "tfds/evil", "torch/cifar10", "torch/evil",
        "hf-hub:evil/model", "local-dir:.", "http://127.0.0.1:9/x", "file:///etc/passwd",
        "../..", "/etc", "~", "canary", f"{canary}", "simple", "advanced", "\x1b[2J", "a\nb",
        "!!python/object/apply:os.system ['touch canary']", "{class_path: evil.Thing}", "x" * 5000,
    ]  # fmt: skip
    others = [None, True, -1, 0, 1, 0.5, 1e-320, 10**6, 10**30, 1e308, float("nan"),
              float("inf"), [], {}, [[[[]]]], b"bytes", {"a": {"b": {"c": []}}}]  # fmt: skip
    return [*classes, *[[one] for one in classes], *sources, *words, *others]


TOP = ("trainer", "model", "data")
PLACES = [
    *((name,) for name in (
        *TOP, "modules", "config", "out", "checkpoint", "save_every", "seed_everything",
        "print_config", "optimizer", "lr_scheduler", "unknown",
    )),
    *(("trainer", name) for name in (
        "callbacks", "logger", "profiler", "plugins", "strategy", "accelerator", "devices",
        "precision", "default_root_dir", "max_time", "max_steps", "limit_val_batches",
        "model_registry", "fast_dev_run", "num_nodes", "detect_anomaly", "deterministic",
        "overfit_batches", "unknown",
    )),
    *((part, name) for part in ("model", "data") for name in ("class_path", "init_args",
                                                            "dict_kwargs", "unknown")),
    *(("model", "init_args", name) for name in (
        "backbone", "num_classes", "attention", "tie_qk", "options", "optimizer",
        "optimizer_options", "schedule", "ema", "init_checkpoint", "freeze", "teacher", "results",
        "mixup", "unknown",
    )),
    *(("model", "init_args", "options", name) for name in (
        "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir",
        "features_only", "norm_layer", "act_layer", "attention_options", "embed_dims", "img_size",
        "num_landmarks", "inverse", "sampler", "device", "dtype", "unknown",
    )),
    *(("data", "init_args", name) for name in (
        "name", "root", "train_split", "val_split", "test_split", "download", "num_workers",
        "auto_augment", "interpolation", "crop_mode", "size", "eval_sizes", "mean", "unknown",
    )),
]  # fmt: skip
BESIDE = [
    ("hyper_parameters",), ("images",), ("state_dict",), ("config",), ("callbacks",), ("loops",),
    ("pytorch-lightning_version",), ("optimizer_states",), ("epoch",),
    *(("hyper_parameters", *place[2:]) for place in PLACES if place[:2] == ("model", "init_args")
      and len(place) > 2),
    ("hyper_parameters", "_instantiator"), ("hyper_parameters", "_class_path"),
    *(("images", name) for name in ("size", "classes", "mean", "std", "crop_pct", "interpolation")),
]  # fmt: skip


def put(values: Any, place: tuple[str, ...], value: Any) -> None:
    for name in place[:-1]:
        if not isinstance(values, dict):
            return
        values = values.setdefault(name, {})
    if isinstance(values, dict):
        values[place[-1]] = value


COMMANDS: dict[str, Callable[[Path], object]] = {
    "predict": lambda path: predict([Path("image.png")], path),
    "validate": lambda path: run("validate", ["--checkpoint", str(path)]),
    "test": lambda path: run("test", ["--checkpoint", str(path)]),
    "fit": lambda path: run(
        "fit", ["--checkpoint", str(path), "--out", "out", "--trainer.max_steps=1"]
    ),
    "figures": lambda path: heatmap([path], [Path("image.png")], (0.5, 0.5), 0, None, Path("out")),
    "explore": lambda path: available_models([path]),
    "export": lambda path: export_checked(str(path), Path("out.pt2")),
    "convert": lambda path: convert(path, Path("out.safetensors")),
    "init_checkpoint": lambda path: initialise(
        timm.create_model("softpp_nano", num_classes=10), find_weights(path)
    ),
}
"""Every command that reads a checkpoint."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder: that of a stranger, with traps in it, and no network."""
    path = tmp_path_factory.mktemp("stranger")
    canary = str(path / "canary")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr("softmaxfree.deploy.export", lambda _, path, __: path.touch())
        patch.setattr("softmaxfree.deploy.compare", lambda *_: [])
        patch.delenv("SOFTMAXFREE_RUN", raising=False)
        (path / "evil.py").write_text(EVIL.format(canary=canary))
        (path / "evil.pth").write_bytes(pickle.dumps(Attack(canary)))
        torch.save({"state_dict": {}, "attack": Attack(canary)}, path / "evil.ckpt")
        (path / "evil.yaml").write_text("modules: [evil]\ntrainer: {callbacks: evil.Thing}\n")
        Image.new("RGB", (16, 16)).save(path / "image.png")
        (path / "small.yaml").write_text(yaml.safe_dump(CONFIG))
        run("fit", ["--config", "small.yaml", "--out", "honest"])
        # The page's own models take long to load.
        patch.setattr("softmaxfree.lab.explore.view.subjects", lambda p: subjects(p) if p else [])
        patch.syspath_prepend(path)  # as with python -m
        for source, name in (
            (socket.socket, "connect"),
            (timm.models._factory, "load_checkpoint"),
            (timm.models._builder, "load_pretrained"),
        ):
            patch.setattr(source, name, lambda *_, **__: Path(canary).touch())
        yield path


@pytest.fixture(scope="module")
def honest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "honest" / "last.ckpt", weights_only=True)
    return found


def canaries(folder: Path) -> list[Path]:
    return [*folder.rglob("*canary*")]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_honest_checkpoint_is_taken(command: str, folder: Path, honest: dict[str, Any]) -> None:
    """Or nothing below would mean anything."""
    if command == "init_checkpoint":
        state = timm.create_model("softpp_nano", num_classes=10).state_dict()
        torch.save({"state_dict": state}, folder / "file.ckpt")
    else:
        torch.save(honest, folder / "file.ckpt")
    COMMANDS[command](folder / "file.ckpt")


def case(number: int, honest: dict[str, Any], values: list[Any]) -> tuple[str, dict[str, Any], str]:
    """A command, a checkpoint with one to three hostile values, and what they are."""
    draw = random.Random(number)
    command = draw.choice(sorted(COMMANDS))
    checkpoint, config = {**honest}, yaml.safe_load(honest["config"])
    for name in ("hyper_parameters", "images"):
        checkpoint[name] = copy.deepcopy(checkpoint[name])
    told = [command]
    for _ in range(draw.randint(1, 3)):
        value = copy.deepcopy(draw.choice(values))
        in_config = command in ("validate", "test", "fit") and draw.random() < 0.75
        place = draw.choice(PLACES if in_config else BESIDE)
        put(config if in_config else checkpoint, place, value)
        told.append(f"{'config ' if in_config else ''}{'.'.join(place)} = {value!r:.200}")
    if checkpoint.get("config") == honest["config"]:
        checkpoint["config"] = yaml.dump(config)
    return command, checkpoint, "; ".join(told)


def test_nothing_is_done_because_a_file_says_so(folder: Path, honest: dict[str, Any]) -> None:
    """Each case ends well or in a sentence, and leaves no canary."""
    values = payloads(str(folder / "canary"))
    wrong = []
    for number in NUMBERS or {*range(CASES), *ONCE_WRONG}:
        command, checkpoint, told = case(number, honest, values)
        torch.save(checkpoint, folder / "file.ckpt")
        shutil.rmtree(folder / "out", ignore_errors=True)
        taken = True
        try:
            COMMANDS[command](folder / "file.ckpt")
        except (UserError, SystemExit):
            taken = False
        except Exception as error:
            wrong.append(f"case {number}: {told}: {error!r:.300}")
        record(kind=f"checkpoints, {command}", dtype="", refused=not taken)
        if found := canaries(folder):
            wrong.append(f"case {number}: {told}: there is {found}")
            for path in found:
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
        if sys.modules.pop("evil", None):
            wrong.append(f"case {number}: {told}: evil was imported")
    assert not wrong, "\n".join(wrong)
