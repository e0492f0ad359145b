"""Lightning's loop over the epochs, resumed exactly where a checkpoint was written."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage as Evaluation
from lightning.pytorch.loops.fit_loop import RestartStage as Fit
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.progress import _ProcessedTracker, _Progress
from lightning.pytorch.loops.training_epoch_loop import RestartStage as Epoch

from ..data.loader import ResumableLoader


class RunLoop(_FitLoop):
    """Continues after the last batch of a checkpoint, as a run that was never stopped would.

    A checkpoint is written in the middle of Lightning's bookkeeping: its batch, and its epoch if
    the batch ends one, are not counted as completed, and a validation may be due. Lightning guesses
    from its counters what is left to do, and loses a validation or trains an epoch twice. This loop
    relies only on the number of processed epochs and batches, and on whether they were validated.
    It sets the counters to their values after the batch, and then does what is left: validation,
    the end of the epoch, the end of the run.
    """

    resumed = False
    """Whether a checkpoint was loaded and training has not continued from it yet."""
    validated = False
    """Whether the validation that is due after the last batch is done."""

    @classmethod
    def install(cls, trainer: Trainer) -> None:
        """Replaces the trainer's own loop."""
        before = trainer.fit_loop
        trainer.fit_loop = cls(trainer, before.min_epochs, before.max_epochs)
        trainer.fit_loop.epoch_loop = before.epoch_loop

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients that no step has used yet, and that no checkpoint holds."""
        return self._should_accumulate()

    @property
    def done(self) -> bool:
        """A run that is resumed after its last step still has to end."""
        return not self.resumed and super().done

    def on_save_checkpoint(self) -> dict[str, Any]:
        return super().on_save_checkpoint() | {"validated": self.validated}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        for count in (*_counts(self.epoch_progress), *_counts(self.epoch_loop.batch_progress)):
            if not isinstance(count.processed, int) or count.processed < 0:
                raise ValueError(f"it has done {count.processed!r} epochs or batches")
        self.resumed, self.validated = True, state_dict.get("validated", False)

    def reset(self) -> None:
        if self.resumed:
            torch.set_grad_enabled(True)
            self._go_to_the_checkpoint()
        else:
            super().reset()

    def on_advance_start(self) -> None:
        super().on_advance_start()
        self.resumed = self.validated = False

    def on_iteration_done(self) -> None:
        super().on_iteration_done()
        self.epoch_loop.on_iteration_done()  # it has none of its own if the epoch was over

    def _go_to_the_checkpoint(self) -> None:
        inner = self.epoch_loop
        for epochs in _counts(self.epoch_progress):
            epochs.completed = epochs.processed
            epochs.ready = epochs.started = epochs.processed + 1
        for batches in _counts(inner.batch_progress):
            batches.ready = batches.started = batches.completed = batches.processed
        self._restart_stage, inner._restart_stage = Fit.RESTARTED_MID_EPOCH, Epoch.RESTARTED_ON_LAST
        self.restarting = True
        inner.val_loop.restarting = False
        assert self._data_fetcher is not None
        if not inner._should_check_val_fx(self._data_fetcher):
            inner.val_loop._has_run = True  # at the end of an epoch no validation is waited for
            inner._batches_that_stepped += 1
        elif not self.validated:
            inner.val_loop._restart_stage = Evaluation.RESTARTED_MID_EVALUATION
        loader = self.trainer.train_dataloader
        if isinstance(loader, ResumableLoader):
            loader.position = inner.batch_progress.current.completed
            loader.resume_at = 0 if inner._num_ready_batches_reached() else loader.position


def _counts(progress: _Progress) -> list[_ProcessedTracker]:
    """The counters of the whole run and of this epoch."""
    found = [progress.total, progress.current]
    return [count for count in found if isinstance(count, _ProcessedTracker)]
