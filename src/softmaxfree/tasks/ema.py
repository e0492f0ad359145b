"""The moving average of the weights, which is scored, saved and used."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from ..errors import UserError


class MovingAverage(WeightAveraging):
    """Averages weights and buffers over the steps, by Lightning.

    The average is in place during validation and after training, and is the `state_dict` of every
    checkpoint; the raw weights are stored as `current_model_state`. Step t keeps
    min(decay, (1 + t) / (10 + t)) of the average, less than `decay` at first. Counters, and buffers
    that a module lists as `unaveraged`, are copied and not averaged.
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"ema must be at least 0 and below 1, got {decay}")
        self.decay = decay
        super().__init__(multi_avg_fn=self._average)

    def _average(
        self, averages: tuple[Tensor, ...], currents: tuple[Tensor, ...], count: Tensor | int
    ) -> None:
        steps = int(count)
        keep = min(self.decay, (1 + steps) / (10 + steps))
        if averages[0].is_floating_point():
            torch._foreach_lerp_(list(averages), list(currents), 1 - keep)
        else:  # counters, such as batch normalisation's
            torch._foreach_copy_(list(averages), list(currents))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        assert self._average_model is not None
        for average, current in zip(self._average_model.module.modules(), pl_module.modules()):
            for name in getattr(current, "unaveraged", ()):
                getattr(average, name).copy_(getattr(current, name))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":  # elsewhere the averaged weights are loaded already
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
