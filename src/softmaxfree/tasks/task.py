"""What all tasks share: optimiser, schedule, averaged weights, freezing, seeds of steps."""

import re
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from ..data.base import Data
from ..data.counters import seed_step
from ..errors import DivergedError, UserError
from ..models.weights import Weights, find_weights, trained
from .ema import MovingAverage
from .warm_start import initialise


class Task(LightningModule):
    """A model and how it is trained; subclasses set `model` and write the steps.

    Args:
        optimizer: timm's name of an optimiser.
        lr: Learning rate after warm-up, for the batch size that is used.
        weight_decay: Weight decay of all parameters but biases, norms and embeddings.
        layer_decay: Factor of the learning rate from each layer to the one before it.
        optimizer_options: Further arguments of the optimiser.
        schedule: How the learning rate falls after warm-up: by half a cosine (cosine), by a factor
            of 10 at milestones (step), linearly from the start of training (poly), or linearly
            from the end of warm-up (one_cycle).
        milestones: Epochs at which the learning rate falls, for step.
        warmup_epochs: Epochs over which the learning rate rises linearly.
        warmup_steps: The same in steps, in place of warmup_epochs.
        warmup_lr: Learning rate at the start of warm-up.
        min_lr: Learning rate at the end, for all schedules but step.
        ema: Decay of the moving average of the weights; no average is kept if not given.
        init_checkpoint: Weights to start from: a name such as softpp_nano.cifar10, a run's folder
            or checkpoint, a file (docs/weights.md). They are taken where names and shapes agree; a
            classifier's go into a detector's backbone. If not given, those that the backbone's tag
            names.
        freeze: Names of parts of the model that are not trained, with * for any characters. Their
            batch normalisation does not change either.
        seed: Seed of all randomness in steps, together with epoch, batch and process.
    """

    model: nn.Module
    monitor = "val/accuracy"
    """The score that decides on best.ckpt."""
    curves: ClassVar[dict[str, list[str]]] = {
        "loss": ["train/loss_epoch", "val/loss"],
        "accuracy in validation": ["val/accuracy", "val/accuracy_top5"],
    }
    """The metrics that are drawn of a run, by the title of their panel."""

    def __init__(
        self,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        layer_decay: float | None = None,
        optimizer_options: dict[str, Any] | None = None,
        schedule: Literal["cosine", "step", "poly", "one_cycle"] = "cosine",
        milestones: list[float] | None = None,
        warmup_epochs: float = 0,
        warmup_steps: int | None = None,
        warmup_lr: float = 1e-6,
        min_lr: float = 1e-5,
        ema: float | None = None,
        init_checkpoint: str | None = None,
        freeze: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.optimizer, self.optimizer_options = optimizer, optimizer_options or {}
        self.lr, self.weight_decay, self.layer_decay = lr, weight_decay, layer_decay
        if (schedule == "step") != bool(milestones):
            raise UserError(
                "milestones are the epochs at which schedule: step lowers the learning rate; "
                f"got schedule: {schedule} with milestones: {milestones}"
            )
        if warmup_epochs and warmup_steps is not None:
            raise UserError(
                f"warm-up is given twice, as {warmup_epochs:g} epochs and as {warmup_steps} steps: "
                "leave out warmup_epochs or warmup_steps"
            )
        positive = {"lr": lr, "warmup_epochs": warmup_epochs, "warmup_steps": warmup_steps or 0}
        for name, value in positive.items():
            if not value >= 0:
                raise UserError(f"--model.{name} must be at least 0, got {value:g}")
        self.schedule, self.milestones = schedule, milestones or []
        self.warmup_epochs, self.warmup_steps = warmup_epochs, warmup_steps
        self.warmup_lr, self.min_lr = warmup_lr, min_lr
        self.ema, self.seed = ema, seed
        self.init_checkpoint = init_checkpoint
        self.freeze_patterns = freeze or []
        self.frozen: list[str] = []

    def freeze_parts(self) -> None:
        """Freezes the parts that the patterns name; subclasses call it when they have a model."""
        for pattern in self.freeze_patterns:
            modules = [name for name, _ in self.model.named_modules() if fnmatchcase(name, pattern)]
            parameters = [p for n, p in self.model.named_parameters() if fnmatchcase(n, pattern)]
            if not modules and not parameters:
                names = ", ".join(name for name, _ in self.model.named_children())
                raise UserError(
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

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads weights; raises UserError if they are of another model."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            reason = " ".join(str(error).split("\n", 1)[-1].split())
            raise UserError(f"the checkpoint is of another model: {reason:.300}") from error

    def configure_optimizers(self) -> Any:
        try:
            optimizer = create_optimizer_v2(
                self.model,
                opt=self.optimizer,
                lr=self.lr,
                weight_decay=self.weight_decay,
                layer_decay=self.layer_decay,
                **self.optimizer_options,
            )
        except (TypeError, ValueError) as error:
            unknown = re.search(r"unexpected keyword argument ('\w+')", str(error))
            raise UserError(
                f"the optimizer {self.optimizer} has no option {unknown[1]}: check "
                "--model.optimizer_options"
                if unknown
                else f"timm makes no optimizer {self.optimizer!r}: {error}"
            ) from error
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise UserError(
                "the learning rate follows a schedule, which needs an end: "
                "give --trainer.max_epochs or --trainer.max_steps"
            )
        schedule = self._schedule(optimizer, int(steps))
        schedule.step_update(0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _schedule(self, optimizer: Any, steps: int) -> Scheduler:
        self.trainer.fit_loop.setup_data()  # Lightning has not done so if max_steps is the end
        batches = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        rising = self.warmup_steps
        if rising is None:
            rising = round(self.warmup_epochs * batches)
        rising = min(rising, steps - 1)
        warmup = {"warmup_t": rising, "warmup_lr_init": self.warmup_lr, "t_in_epochs": False}
        if self.schedule == "step":
            after = [round(epoch * batches) + 1 for epoch in self.milestones]  # timm looks ahead
            return MultiStepLRScheduler(optimizer, after, 0.1, warmup_prefix=False, **warmup)
        falling = {"t_initial": steps, "lr_min": self.min_lr, **warmup}
        if self.schedule == "cosine":
            return CosineLRScheduler(optimizer, **falling)
        if self.schedule == "one_cycle":
            falling |= {"t_initial": steps - rising, "warmup_prefix": True}
        return PolyLRScheduler(optimizer, power=1.0, **falling)

    @property
    def data(self) -> Data | None:
        """The data module, if it is ours."""
        data = getattr(self.trainer, "datamodule", None)
        return data if isinstance(data, Data) else None

    def start_from(self, backbone: str) -> None:
        """Starts from the weights that a backbone's tag names, unless others are given."""
        if self.init_checkpoint is None and trained(backbone):
            self.init_checkpoint = backbone

    def initialised(self, weights: Weights) -> nn.Module:
        """The part of the model that takes these weights."""
        return self.model

    def setup(self, stage: str) -> None:
        with suppress(UserError):  # files that are gone matter only if no checkpoint follows
            self.take_weights()

    def take_weights(self) -> None:
        """Takes the weights of init_checkpoint, once."""
        if self.init_checkpoint:
            weights = find_weights(self.init_checkpoint)
            taken = initialise(self.initialised(weights), weights)
            if self.trainer.is_global_zero:
                print(taken)
            self.init_checkpoint = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.init_checkpoint = None  # the checkpoint has all weights

    def on_fit_start(self) -> None:
        self.take_weights()  # refuses what is not there, unless there was a checkpoint

    def on_validation_start(self) -> None:
        self.take_weights()

    def on_test_start(self) -> None:
        self.take_weights()

    def closing_scores(self) -> dict[str, Any]:
        """The scores of a finished run by name: all that validation measures."""
        found = self.trainer.validate(self, datamodule=self.data, verbose=False)
        return {name.removeprefix("val/"): value for part in found for name, value in part.items()}

    def closing_lines(self, scores: dict[str, Any]) -> list[str]:
        """The scores as lines to print, the most important one last."""
        return [f"{name:15}{value:.4f}" for name, value in scores.items()]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        seed_step(self.seed, self.trainer.current_epoch, batch_idx, self.trainer.global_rank)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.score(batch, "val", dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.score(batch, "test", dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self.log_scores("val")

    def on_test_epoch_end(self) -> None:
        self.log_scores("test")

    def score(self, batch: Any, part: str, loader: int) -> None:
        """Scores a batch of the validation ("val") or test split."""
        raise NotImplementedError

    def log_scores(self, part: str) -> None:
        """Logs the scores of an epoch that `score` has not logged."""

    def logged(self, loss: Tensor, indices: Tensor) -> Tensor:
        """Logs and returns the loss of a training step on the samples with these indices.

        Raises:
            DivergedError: If the loss is not finite, before it reaches the weights.
        """
        if torch.isfinite(loss):
            size = len(indices)
            self.log(
                "train/loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=size
            )
            return loss
        numbers = indices.tolist()
        names = self.data.describe(numbers) if self.data else [str(number) for number in numbers]
        raise DivergedError(
            f"the loss is {loss.item()} at step {self.trainer.global_step} (epoch "
            f"{self.trainer.current_epoch}), and training stopped before it reached the weights; "
            f"the last checkpoint is good; the batch: {', '.join(names)}"
        )
