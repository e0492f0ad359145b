"""The log of a run, its progress bar and its speed."""

import json
import math
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_only

from ..data.loader import ResumableLoader
from ..files import append, write_atomically


class LineLogger(Logger):
    """Appends metrics to metrics.jsonl, one line of JSON each time they are logged.

    A run first removes the lines of steps that it takes again, and writes no line twice. The means
    of an epoch in which a run was killed are of the steps since; if it was killed after the last
    of them, there are none.

    A run has it beside the loggers of --trainer.logger. Lightning's CSVLogger does not serve in its
    place: it deletes the file of a run that is resumed, and rewrites the whole file, not
    atomically, whenever a new metric appears.

    Args:
        folder: The run's folder.
        begin: The steps of the checkpoint that the run goes on from.
    """

    def __init__(self, folder: Path, begin: int = 0) -> None:
        super().__init__()
        self.folder, self.path = folder, folder / "metrics.jsonl"
        self.begin: int | None = begin
        self.step: int | None = None
        self.written: set[bytes] = set()
        """The lines of this step."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def version(self) -> str:
        return ""

    @property
    def log_dir(self) -> str:
        return str(self.folder)

    save_dir = log_dir

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """The run's configuration is in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.begin is not None:
            kept = [line for line in _lines(self.path) if _entry(line)[0] < self.begin]
            write_atomically(self.path, b"".join(line + b"\n" for line in kept))
            self.step, self.begin = self.begin - 1, None
            self.written = {line for line in kept if _entry(line)[0] == self.step}
        if step != self.step:
            self.step, self.written = step, set()
        line = json.dumps({"step": step, **metrics}).encode()
        if line not in self.written:
            append(self.path, line)
            self.written.add(line)


def read_metrics(path: Path) -> dict[str, list[tuple[float, float]]]:
    """(step, value) by name. Where a step was repeated after a kill, its last value counts."""
    found: dict[str, dict[float, float]] = {}
    for line in _lines(path):
        step, values = _entry(line)
        for name, value in values.items():
            found.setdefault(name, {})[step] = value
    return {name: sorted(values.items()) for name, values in found.items()}


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def _entry(line: bytes) -> tuple[float, dict[str, float]]:
    """A line's step and values; none, after all steps, if `LineLogger` has not written it whole."""
    try:
        entry = json.loads(line)
        step = int(entry.pop("step"))
        return step, {name: float(value) for name, value in entry.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return math.inf, {}


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with only the epoch, the loss and the score, to fit 80 columns."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:  # type: ignore[override]
        score = str(getattr(pl_module, "monitor", ""))
        shown = {"loss": "train/loss_step", score.rpartition("/")[2]: score}
        found = trainer.progress_bar_metrics
        return {name: f"{found[key]:.3f}" for name, key in shown.items() if key in found}

    def on_train_epoch_start(self, trainer: Trainer, *arguments: Any) -> None:
        super().on_train_epoch_start(trainer, *arguments)
        epochs = trainer.max_epochs or -1
        of = f"/{epochs}" if epochs > 0 else ""
        self.train_progress_bar.set_description(f"epoch {trainer.current_epoch + 1}{of}")


class Pace(Callback):
    """Logs samples per second, and the share of a step's time spent waiting for data.

    The time of validation between two steps is not counted.
    """

    def __init__(self) -> None:
        self.seconds = self.waited = 0.0
        self.first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first_step = trainer.global_step
        self._begin(trainer)  # a resumed epoch has no start

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self.waited_before, self.seconds_before = self._waited(trainer), self.seconds
        self.samples = 0
        self.mark = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self.mark = self.mark, time.perf_counter()
        self.seconds += self.mark - before
        self.samples += len(batch[0]) * trainer.world_size

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.samples:
            return
        seconds = self.seconds - self.seconds_before
        waited = self._waited(trainer) - self.waited_before
        self.waited += waited
        pl_module.log("train/data_wait", waited / seconds, prog_bar=True)
        pl_module.log("train/samples_per_second", self.samples / seconds)

    @staticmethod
    def _waited(trainer: Trainer) -> float:
        loader = trainer.train_dataloader
        return loader.waited if isinstance(loader, ResumableLoader) else 0.0
