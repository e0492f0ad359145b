"""Runs of a second, in processes forked from this one, which are killed on a schedule."""

import json
import logging
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from softmaxfree.checkpoint_files import LAST, holds_run, sound_checkpoint
from softmaxfree.data.base import Data
from softmaxfree.data.loader import ResumableLoader
from softmaxfree.data.samples import Batch, Samples, collate
from softmaxfree.data.sources import Source
from softmaxfree.files import write_atomically
from softmaxfree.tasks.task import Task
from softmaxfree.training.checkpoint import AtomicCheckpointIO, RunCheckpoint, Stopped
from softmaxfree.training.loop import RunLoop


class Points(Source):
    """Eight numbers and the sign of their sum, some of them wrong."""

    def __init__(self, length: int, seed: int) -> None:
        self.points = torch.randn(length, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.points)

    def load(self, index: int) -> Any:
        point = self.points[index]
        return point, int(point.sum() > 0) ^ (index % 7 == 0)

    def describe(self, index: int) -> str:
        return str(index)


class PointData(Data):
    def __init__(self, batches: int, workers: int) -> None:
        super().__init__({}, batch_size=4, eval_batch_size=4, num_workers=workers, seed=3)
        self.sources = {"train": Points(4 * batches, seed=1), "val": Points(12, seed=2)}

    def samples(self, part: str, prepare: Callable[[Any, Any], Any]) -> dict[str, Any]:
        samples = Samples(
            self.sources[part], prepare, (torch.zeros(8), -1), self.seed, part == "train"
        )
        return {"dataset": samples, "collate": collate, "check": lambda batch, loader: None}

    def train_dataloader(self) -> ResumableLoader:
        return self.training_loader(**self.samples("train", noisy))

    def val_dataloader(self) -> ResumableLoader:
        return self.evaluation_loader(**self.samples("val", unchanged))


def noisy(point: Tensor, target: int) -> tuple[Tensor, int]:
    return point + torch.randn(8), target


def unchanged(point: Tensor, target: int) -> tuple[Tensor, int]:
    return point, target


class PointTask(Task):
    """Batch normalisation, dropout and the average are what is easily lost."""

    def __init__(self, ema: float | None) -> None:
        super().__init__(lr=0.05, warmup_steps=3, ema=ema, seed=3)
        self.model = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch.images), batch.targets)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = F.cross_entropy(self.model(batch.images), batch.targets)
        self.log("val/accuracy", -loss, batch_size=len(batch.targets))


@dataclass(frozen=True)
class Plan:
    """What a run is told."""

    batches: int = 3
    """Of an epoch."""
    save_every: int = 100
    max_epochs: int = -1
    max_steps: int = -1
    check_val_every_n_epoch: int | None = 1
    val_check_interval: int | float = 1.0
    accumulate_grad_batches: int = 1
    limit_train_batches: int | float = 1.0
    ema: float | None = 0.9
    workers: int = 0

    def trainer(self) -> dict[str, Any]:
        own = ("batches", "save_every", "ema", "workers")
        return {name: value for name, value in vars(self).items() if name not in own}


@dataclass(frozen=True)
class Kill:
    """A signal that a process sends itself."""

    event: int | str
    """After how many of the events below, or after which: "last.ckpt 6" is written at step 6."""
    number: int = signal.SIGKILL


class Killer(Callback):
    """Counts what happens in a process, and ends it when it is time."""

    HOOKS: ClassVar = (
        "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end",
        "on_validation_start", "on_validation_batch_end", "on_validation_end",
        "on_train_epoch_end", "on_train_end",
    )  # fmt: skip

    def __init__(self, kill: Kill | None) -> None:
        self.kill, self.events, self.step = kill, 0, 0
        for name in self.HOOKS:
            setattr(self, name, partial(self.happens, name))
        for function in (os.link, os.replace):
            setattr(os, function.__name__, partial(self.moves, function))

    def happens(self, name: str, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.step = trainer.global_step
        self.count(name)

    def moves(self, function: Callable[..., None], source: Any, target: Any) -> None:
        """A file is about to take its place, and has."""
        self.count(f"before {Path(target).name}")
        function(source, target)
        self.count(Path(target).name)

    def count(self, name: str) -> None:
        if self.kill and self.kill.event in (self.events, f"{name} {self.step}"):
            os.kill(os.getpid(), self.kill.number)
        self.events += 1


def fit(plan: Plan, folder: Path, kill: Kill | None) -> None:
    """Trains as the command does, from last.ckpt if there is one, and leaves the scores."""
    resumed = sound_checkpoint(folder / LAST) if holds_run(folder) else None
    task = PointTask(plan.ema)
    if resumed is None:
        torch.manual_seed(5)
        for parameter in task.parameters():
            nn.init.normal_(parameter, std=0.5)
    saving = RunCheckpoint(folder, task.monitor, plan.save_every, resumed=resumed == folder / LAST)
    trainer = Trainer(
        accelerator="cpu", default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
        plugins=[AtomicCheckpointIO()], callbacks=[Killer(kill), saving], **plan.trainer(),
    )  # fmt: skip
    RunLoop.install(trainer)
    data = PointData(plan.batches, plan.workers)
    trainer.fit(task, datamodule=data, ckpt_path=resumed, weights_only=True)
    steps, scores = trainer.global_step, task.closing_scores()
    write_atomically(folder / "result.json", json.dumps({"steps": steps, **scores}))


def forked(plan: Plan, folder: Path, kill: Kill | None = None) -> int:
    """The exit code of a process that trains."""
    with warnings.catch_warnings(action="ignore"):  # of threads that a fork leaves behind
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 70
    try:
        signal.alarm(60)  # a loop without an end
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        os.fsync = lambda handle: None  # which guards against the machine's end, not a process's
        fit(plan, folder, kill)
        code = 0
    except Stopped as stop:
        code = stop.exit_code
    except (SystemExit, KeyboardInterrupt):  # before or after training
        code = 1
    except BaseException:
        (folder / "failed.txt").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves: both checkpoints, every counter and tensor of them, and its scores."""
    found: dict[str, Any] = {"result": json.loads((folder / "result.json").read_text())}
    for name in (LAST, "best.ckpt"):
        path = folder / name
        found[name] = torch.load(path, weights_only=True) if path.exists() else None
    return found


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Names of all that is not equal to the bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            difference
            for key in sorted({*one, *other}, key=str)
            for difference in differences(one.get(key), other.get(key), f"{name}/{key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other))
        return [found for i, pair in pairs for found in differences(*pair, f"{name}/{i}")]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if torch.equal(one, other) else [name]
    return [] if one == other else [f"{name}: {one} and {other}"]


_OUTCOMES: dict[str, dict[str, Any]] = {}


def unbroken(plan: Plan) -> dict[str, Any]:
    """The outcome of a run that is never stopped; computed once for each plan.

    By the plan's text: plans with 1 and 1.0 are equal, but one batch is not all batches.
    """
    if repr(plan) not in _OUTCOMES:
        _OUTCOMES[repr(plan)] = broken(plan)
    return _OUTCOMES[repr(plan)]


def broken(plan: Plan, *kills: Kill) -> dict[str, Any]:
    """The outcome of a run that is killed so often, and gone on with each time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kill in kills:
            forked(plan, folder, kill)
        failed = folder / "failed.txt"
        code = forked(plan, folder)
        assert code == 0, failed.read_text() if failed.exists() else code
        assert not failed.exists(), failed.read_text()
        return outcome(folder)
