"""Checkpoints of a run: when they are written, how, and what a signal does."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from ..errors import DivergedError, UserError
from ..files import atomic_file, remove_unfinished

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):  # noqa: N818 (not an error)
    """A signal asked the run to stop, and its state is saved."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that replace the old one only when they are whole and on the disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        with atomic_file(Path(path)) as file:
            torch.save(checkpoint, file)


class RunCheckpoint(Checkpoint):
    """Writes last.ckpt and best.ckpt, and saves before a signal ends the run.

    last.ckpt holds the whole state: every `save_every` steps, at the end of every epoch and of the
    run, and on SIGINT, SIGTERM and SIGUSR1. best.ckpt is the one of the highest score in
    validation. Both have the averaged weights, if there are any, as their state_dict.

    Lightning calls checkpoint callbacks after all others, so that averaged weights are up to date.

    Args:
        folder: The run's.
        monitor: What best.ckpt is the highest of.
        save_every: Steps from one last.ckpt to the next.
        config: The run's configuration, kept in the checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        monitor: str,
        save_every: int = 500,
        config: str | None = None,
    ) -> None:
        if save_every < 1:
            raise UserError(f"--save_every must be at least 1, got {save_every}")
        self.last, self.best = folder / "last.ckpt", folder / "best.ckpt"
        self.save_every, self.monitor, self.config = save_every, monitor, config
        self.highest = float("-inf")
        self.step = 0
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            remove_unfinished(self.last)
            remove_unfinished(self.best)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number:  # asked twice: now
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()  # before Lightning gives back its own: it would stay, and its trainer

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
        self._stop_if_asked(trainer, before=lambda: self.save(trainer, self.last))
        ends = self.step == trainer.max_steps or trainer.should_stop  # within an epoch
        if self.step % self.save_every == 0 or trainer.is_last_batch or ends:
            self.save(trainer, self.last)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop_if_asked(trainer, before=lambda: None)  # saved before validation

    def _stop_if_asked(self, trainer: Trainer, before: Callable[[], None]) -> None:
        asked = self.received is not None
        if trainer.world_size > 1:  # all processes stop at the same step
            asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if asked:
            before()
            name = self.received.name if self.received else "a signal to another process"
            raise Stopped(
                f"stopped by {name} after step {trainer.global_step}",
                self.received or signal.SIGTERM,
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.state.fn != "fit" or trainer.sanity_checking or value is None:
            return
        if float(value) > self.highest:
            self.highest = float(value)
            self.save(trainer, self.best)

    def save(self, trainer: Trainer, path: Path) -> None:
        """Saves, unless weights are no longer finite: then the file that is there stays."""
        if getattr(trainer, "fast_dev_run", False):
            return
        for name, parameter in trainer.lightning_module.named_parameters():
            if not torch.isfinite(parameter).all():
                raise DivergedError(
                    f"the weights {name} are no longer finite after step {trainer.global_step}; "
                    f"the last good checkpoint is kept"
                )
        trainer.save_checkpoint(path)

    def state_dict(self) -> dict[str, Any]:
        return {"highest": self.highest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.highest = state_dict["highest"]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self.config
