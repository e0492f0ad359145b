"""What all tasks share: optimiser, schedule, averaged weights, freezing, randomness of a step."""

from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from ..data.counters import seed_step
from .ema import MovingAverage


class Task(LightningModule):
    """A model with what trains it; subclasses set `model` and write the steps.

    Args:
        optimizer: timm's name of an optimiser.
        lr: Learning rate after warm-up, for the batch size that is used.
        weight_decay: Of all parameters but biases, norms and embeddings.
        layer_decay: Factor of the learning rate from each layer to the one before it.
        optimizer_options: Further arguments of the optimiser.
        warmup_epochs: Epochs over which the learning rate rises linearly.
        warmup_lr: Learning rate that it rises from.
        min_lr: Learning rate that its half cosine ends with.
        ema: Decay of the moving average of the weights; none is kept if not given.
        freeze: Names of parts of the model that are not trained, with * for any characters;
            their batch normalisation stays as it is.
        seed: What is random in a step is a function of (seed, epoch, batch, process).
    """

    model: nn.Module

    def __init__(
        self,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        layer_decay: float | None = None,
        optimizer_options: dict[str, Any] | None = None,
        warmup_epochs: float = 0,
        warmup_lr: float = 1e-6,
        min_lr: float = 1e-5,
        ema: float | None = None,
        freeze: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.optimizer, self.optimizer_options = optimizer, optimizer_options or {}
        self.lr, self.weight_decay, self.layer_decay = lr, weight_decay, layer_decay
        self.warmup_epochs, self.warmup_lr, self.min_lr = warmup_epochs, warmup_lr, min_lr
        self.ema, self.seed = ema, seed
        self.freeze_patterns = freeze or []
        self.frozen: list[str] = []

    def freeze_parts(self) -> None:
        """Freezes what the patterns name; called once the model is there."""
        for pattern in self.freeze_patterns:
            modules = [name for name, _ in self.model.named_modules() if fnmatchcase(name, pattern)]
            parameters = [p for n, p in self.model.named_parameters() if fnmatchcase(n, pattern)]
            if not modules and not parameters:
                names = ", ".join(name for name, _ in self.model.named_children())
                raise ValueError(
                    f"nothing of the model is called {pattern!r}, so it cannot be frozen; "
                    f"its parts are {names}, and * stands for any characters"
                )
            for parameter in parameters:
                parameter.requires_grad_(False)
            for name in modules:
                self.model.get_submodule(name).requires_grad_(False)
            self.frozen += modules
        self.train(self.training)

    def train(self, mode: bool = True) -> "Task":
        super().train(mode)
        for name in getattr(self, "frozen", []):
            self.model.get_submodule(name).eval()
        return self

    def configure_callbacks(self) -> list[Callback]:
        return [] if self.ema is None else [MovingAverage(self.ema)]

    def configure_optimizers(self) -> Any:
        optimizer = create_optimizer_v2(
            self.model,
            opt=self.optimizer,
            lr=self.lr,
            weight_decay=self.weight_decay,
            layer_decay=self.layer_decay,
            **self.optimizer_options,
        )
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ValueError(
                "the learning rate follows a schedule, which needs an end: "
                "give --trainer.max_epochs or --trainer.max_steps"
            )
        batches = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        schedule = CosineLRScheduler(
            optimizer,
            t_initial=int(steps),
            lr_min=self.min_lr,
            warmup_t=min(round(self.warmup_epochs * batches), int(steps) - 1),
            warmup_lr_init=self.warmup_lr,
            t_in_epochs=False,
        )
        schedule.step_update(0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        seed_step(self.seed, self.trainer.current_epoch, batch_idx, self.trainer.global_rank)

    def check_finite(self, loss: Tensor, indices: Tensor) -> None:
        """Stops at a loss that is not finite, before it reaches the weights."""
        if torch.isfinite(loss):
            return
        data = getattr(self.trainer, "datamodule", None)
        numbers = indices.tolist()
        names = data.describe(numbers) if data else [str(number) for number in numbers]
        raise RuntimeError(
            f"the loss is {loss.item()} at step {self.trainer.global_step} (epoch "
            f"{self.trainer.current_epoch}), and training stopped before it reached the weights; "
            f"the last checkpoint is good; the batch: {', '.join(names)}"
        )
