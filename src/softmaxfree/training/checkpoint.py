"""Writes the checkpoints of a run, also when a signal stops it."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from ..checkpoint_files import LAST, PREVIOUS, keep_previous, write_checkpoint
from ..errors import DivergedError, UserError
from ..files import remove_unfinished
from ..models.checkpoints import read_run_checkpoint
from .log import LineLogger
from .loop import RunLoop

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):  # noqa: N818 (not an error)
    """Raised when a signal has stopped the run and its state is saved."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class AtomicCheckpointIO(TorchCheckpointIO):
    """Replaces a checkpoint only when the new one is complete and on the disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: Any = True
    ) -> Any:
        return read_run_checkpoint(Path(path))


class RunCheckpoint(Checkpoint):
    """Writes last.ckpt and best.ckpt, and saves before a signal ends the run.

    last.ckpt holds the whole state. It is written every `save_every` steps, at the end of every
    epoch and of the run, before every validation, and on SIGINT, SIGTERM and SIGUSR1. The file that
    it replaces is kept as previous.ckpt. best.ckpt is the checkpoint with the highest score in
    validation. If weights are averaged, the average is the state_dict of all of them.

    Lightning calls checkpoint callbacks after all others, so that averaged weights are up to date.

    Args:
        folder: The run's folder.
        monitor: Name of the score that decides on best.ckpt.
        save_every: Steps between two checkpoints.
        config: The run's configuration, kept in the checkpoints.
        resumed: Whether the run continues from its last.ckpt, which is then known to be sound.
        record: Writes the run's record. The first process calls it when training starts, after
            which nothing can be missing, and with every last.ckpt.
    """

    def __init__(
        self,
        folder: Path,
        monitor: str,
        save_every: int = 500,
        config: str | None = None,
        resumed: bool = False,
        record: Callable[[], None] = lambda: None,
    ) -> None:
        if save_every < 1:
            raise UserError(f"--save_every must be at least 1, got {save_every}")
        self.last, self.best = folder / LAST, folder / "best.ckpt"
        self.save_every, self.monitor, self.config = save_every, monitor, config
        self.highest = float("-inf")
        self.step = 0
        self.resumed, self.record = resumed, record
        self.saved: int | None = None  # the step of last.ckpt, if that is known to be sound
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            for path in (self.last, self.best, self.last.with_name(PREVIOUS)):
                remove_unfinished(path)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            self.record()
        self.step = trainer.global_step
        self.saved = self.step if self.resumed else None
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number:  # the second Ctrl-C stops at once
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before Lightning restores its own handlers: otherwise they stay installed and keep the
        # trainer alive.
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        self._release()

    def _release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._before = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:  # in the middle of an accumulated batch
            return
        self.step = trainer.global_step
        self._stop_if_asked(trainer)
        ends = self.step == trainer.max_steps or trainer.should_stop  # within an epoch
        if self.step % self.save_every == 0 or trainer.is_last_batch or ends:
            self._log_step(trainer)
            self._save_last(trainer)

    @staticmethod
    def _log_step(trainer: Trainer) -> None:
        """Writes the step's metrics to our log, before a checkpoint from which it is not repeated.

        Lightning logs them after the checkpoint, and our log then has them already.
        """
        loggers = trainer.loggers
        trainer.loggers = [logger for logger in loggers if isinstance(logger, LineLogger)]
        trainer._logger_connector.update_train_step_metrics()
        trainer.loggers = loggers

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves before validation, during which the averaged weights are in place."""
        if _in_training(trainer) and not _loop(trainer).accumulating:
            self._save_last(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if _in_training(trainer) and not _loop(trainer).accumulating:
            self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.monitor)
        if not _in_training(trainer) or value is None:
            return
        if float(value) > self.highest:
            self.highest = float(value)
            self.save(trainer, self.best, validated=True)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        asked = self.received is not None
        if trainer.world_size > 1:  # all processes stop at the same step
            asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if asked:
            self._save_last(trainer)
            name = self.received.name if self.received else "a signal to another process"
            raise Stopped(
                f"stopped by {name} after step {trainer.global_step}",
                self.received or signal.SIGTERM,
            )

    def _save_last(self, trainer: Trainer) -> None:
        """Writes last.ckpt, unless it already has this step."""
        if self.saved == trainer.global_step:
            return
        self.save(trainer, self.last)
        self.saved = trainer.global_step
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            self.record()

    def save(self, trainer: Trainer, path: Path, validated: bool = False) -> None:
        """Saves, unless a weight is no longer finite: then the old file stays."""
        if getattr(trainer, "fast_dev_run", False):
            return
        for name, parameter in trainer.lightning_module.named_parameters():
            if not torch.isfinite(parameter).all():
                raise DivergedError(
                    f"the weights {name} are no longer finite after step {trainer.global_step}; "
                    f"the last good checkpoint is kept"
                )
        if path == self.last and self.saved is not None and trainer.is_global_zero:
            keep_previous(path)
        loop = _loop(trainer)
        loop.validated = validated
        trainer.save_checkpoint(path)
        loop.validated = False

    def state_dict(self) -> dict[str, Any]:
        return {"highest": self.highest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.highest = float(state_dict["highest"])

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self.config


def _loop(trainer: Trainer) -> RunLoop:
    assert isinstance(trainer.fit_loop, RunLoop)
    return trainer.fit_loop


def _in_training(trainer: Trainer) -> bool:
    """Whether a validation takes place between steps of training."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking
