"""Image classification: any backbone of timm, ours first."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from ..data import ImageData
from ..data.base import other_classes, several
from ..data.samples import NOTHING, Batch
from ..errors import UserError
from ..models.build import BackboneConfig, build_model
from ..models.weights import find_weights
from .task import Task
from .warm_start import Teacher, distillation_loss


class Classification(Task):
    """Learns the class of an image.

    Args:
        backbone: Name of a model in timm, such as softpp_tiny; with a tag, as in
            softpp_nano.cifar10, training starts from these weights.
        num_classes: Number of classes; if not given, `softmaxfree fit` counts those of the data,
            and in Python it is the backbone's own.
        attention: Attention to use in the backbone, also in timm's ViT, DeiT and Swin: soft,
            softpp, softmax, linformer, spatial_reduction, performer, nystromformer, agent,
            reformer, skyformer, gaussian, or one that a module of --modules registers.
        tie_qk: Whether queries and keys share one projection; for our models, and timm's ViT, DeiT
            and Swin.
        drop_path: Probability of leaving out a block, rising with depth.
        options: Further arguments of the backbone.
        mixup: Strength of mixup; 0 for none.
        cutmix: Strength of cutmix; 0 for none.
        mix_prob: Probability that a batch is mixed.
        smoothing: Label smoothing.
        teacher: Weights of a model whose predictions are learned too: a name such as
            resnet18.a1_in1k, a run's folder or checkpoint, a file.
        distillation: Learn the teacher's probabilities (soft) or its decisions (hard).
        distillation_weight: Weight of the teacher beside the labels, 0 to 1.
        temperature: Divisor of the logits in soft distillation.
        task: Arguments of Task: optimiser, schedule, moving average, weights to start from.
    """

    def __init__(
        self,
        backbone: str = "softpp_nano",
        num_classes: int | None = None,
        attention: str | None = None,
        tie_qk: bool | None = None,
        drop_path: float = 0.0,
        options: dict[str, Any] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_prob: float = 1.0,
        smoothing: float = 0.0,
        teacher: str | None = None,
        distillation: Literal["soft", "hard"] = "soft",
        distillation_weight: float = 0.5,
        temperature: float = 1.0,
        **task: Any,
    ) -> None:
        super().__init__(**task)
        self.start_from(backbone)
        if not 0 <= smoothing < 1:
            raise UserError(f"--model.smoothing must be at least 0 and below 1, got {smoothing:g}")
        config = BackboneConfig(backbone, attention, tie_qk, drop_path, options)
        self.model = build_model(config, num_classes)
        classes: Any = self.model.num_classes
        self.num_classes = num_classes = int(classes)
        self.save_hyperparameters()
        self.smoothing = smoothing
        self.mix = (
            Mixup(mixup, cutmix, prob=mix_prob, label_smoothing=smoothing, num_classes=num_classes)
            if mixup or cutmix
            else None
        )
        self.teacher_name = teacher
        self.distillation, self.temperature = distillation, temperature
        self.distillation_weight = distillation_weight
        self.teacher: Teacher | None = None
        self.scores = nn.ModuleList()
        self.freeze_parts()

    @property
    def images(self) -> ImageData | None:
        """The data module, if it is ours."""
        return self.data if isinstance(self.data, ImageData) else None

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        data = self.images
        if self.mix and data and data.samples_per_process() % 2:
            raise UserError(
                f"mixup and cutmix need an even number of images in a process, and "
                f"--data.batch_size {data.batch_size} gives {data.samples_per_process()}"
            )
        if self.teacher_name:
            if data is None:
                raise UserError("a teacher needs to know how images are normalised: use ImageData")
            normal = data.preparation
            weights = find_weights(self.teacher_name)
            self.teacher = Teacher(weights, self.num_classes, normal["mean"], normal["std"])

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.teacher:
            self.teacher.to(self.device)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, H, W)."""
        logits: Tensor = self.model(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, targets = batch.images, batch.targets
        smoothing = self.smoothing
        if self.mix:  # smooths as well
            images, targets = self.mix(images, targets)
            smoothing = 0.0
        logits = self(images)
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        if self.teacher:
            taught = distillation_loss(
                logits, self.teacher(images), self.distillation, self.temperature
            )
            loss = torch.lerp(loss, taught, self.distillation_weight)
        return self.logged(loss, batch.indices)

    def on_validation_epoch_start(self) -> None:
        loaders = self.trainer.val_dataloaders or self.trainer.test_dataloaders or []
        while len(self.scores) < len(loaders):
            self.scores.append(Scores(self.num_classes))
        self.scores.to(self.device)

    on_test_epoch_start = on_validation_epoch_start

    def score(self, batch: Batch, part: str, loader: int) -> None:
        there = batch.targets != NOTHING
        scores = self.scores[loader]
        assert isinstance(scores, Scores)
        scores.count(self(batch.images)[there], batch.targets[there])
        suffix = ""
        if self.images and self.images.eval_sizes[loader] != self.images.size:
            suffix = f"@{self.images.eval_sizes[loader]}"
        for name, metric in scores.items():
            assert isinstance(metric, Metric)
            self.log(
                f"{part}/{name}{suffix}",
                metric,
                on_epoch=True,
                prog_bar=name == "accuracy" and loader == 0,
                add_dataloader_idx=False,
                batch_size=len(batch.targets),
            )

    def closing_scores(self) -> dict[str, Any]:
        """Accuracy by image size."""
        data = self.images
        if data is None:
            return super().closing_scores()
        sizes = data.closing_sizes
        before, data.eval_sizes = data.eval_sizes, sizes
        try:
            found = super().closing_scores()
        finally:
            data.eval_sizes = before
        suffixes = ["" if size == data.size else f"@{size}" for size in sizes]
        return {
            "accuracy": {
                str(size): found[f"accuracy{suffix}"] for size, suffix in zip(sizes, suffixes)
            }
        }

    def closing_lines(self, scores: dict[str, Any]) -> list[str]:
        by_size = scores["accuracy"]
        if not isinstance(by_size, dict):
            return super().closing_lines(scores)
        lines = [
            f"accuracy       {accuracy * 100:.2f} % at {size} x {size} pixels"
            for size, accuracy in by_size.items()
        ]
        first = next(iter(by_size.values()))
        return [*lines, f"held-out accuracy: {first * 100:.2f} %"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises UserError if the data has other classes than the checkpoint."""
        super().on_load_checkpoint(checkpoint)
        told = checkpoint.get("images")
        trained = told.get("classes") if isinstance(told, dict) else None
        classes = self.images.classes if self.images else None
        if classes and isinstance(trained, list | tuple) and trained and classes != [*trained]:
            raise other_classes(classes, f"the checkpoint has {several([*map(str, trained)])}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the preparation of images and the names of classes, for prediction."""
        data = self.images
        if data is not None:
            checkpoint["images"] = {
                "size": data.size,
                "classes": data.classes,
                **{
                    name: list(value) if isinstance(value, tuple) else value
                    for name, value in data.preparation.items()
                },
            }


class Scores(nn.ModuleDict):
    """Loss, top-1 and top-5 accuracy over all samples of all processes."""

    def __init__(self, num_classes: int) -> None:
        top5 = (
            {"accuracy_top5": MulticlassAccuracy(num_classes, top_k=5, average="micro")}
            if num_classes > 5
            else {}
        )
        super().__init__(
            {
                "accuracy": MulticlassAccuracy(num_classes, average="micro"),
                **top5,
                "loss": MeanMetric(),
            }
        )

    def count(self, logits: Tensor, targets: Tensor) -> None:
        if not len(targets):
            return
        for name, metric in self.items():
            if name == "loss":
                metric.update(F.cross_entropy(logits, targets), weight=len(targets))  # type: ignore[operator]
            else:
                metric.update(logits, targets)  # type: ignore[operator]
