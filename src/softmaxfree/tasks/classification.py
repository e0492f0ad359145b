"""Image classification: any backbone of timm, ours first."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from ..data import ImageData
from ..data.samples import NOTHING, Batch
from ..models.replace import replace_attention, replaceable
from ..models.replace import tie_qk as make_tied
from .task import Task
from .warm_start import Teacher, distillation_loss, initialise


class Classification(Task):
    """Learns the class of an image.

    Args:
        backbone: Name of a model in timm, such as softpp_tiny.
        num_classes: As many as the data has.
        attention: Another attention in the same backbone: soft, softpp, softmax, linformer,
            spatial_reduction, performer, nystromformer, reformer, skyformer, gaussian, or one that
            a module of --modules registers; also in timm's ViT, DeiT and Swin.
        tie_qk: One projection for queries and keys: of ours, and of timm's ViT, DeiT and Swin.
        drop_path: Probability of leaving out a block, rising with depth.
        options: Further arguments of the backbone.
        init_from: A checkpoint whose weights are taken where names and shapes agree: of a run, to
            fine-tune it, or of the authors' release.
        mixup: Strength of mixup; 0 for none.
        cutmix: Strength of cutmix; 0 for none.
        mix_prob: Probability that a batch is mixed.
        smoothing: Label smoothing.
        teacher: Name of a model in timm to learn from as well.
        teacher_checkpoint: Its weights; timm's pretrained ones, fetched, if not given.
        distillation: Learn the teacher's probabilities (soft) or its decisions (hard).
        distillation_weight: Weight of the teacher beside the labels, 0 to 1.
        temperature: What the logits are divided by in soft distillation.
        task: Optimiser, schedule, moving average: those of Task.
    """

    def __init__(
        self,
        backbone: str = "softpp_nano",
        num_classes: int = 10,
        attention: str | None = None,
        tie_qk: bool | None = None,
        drop_path: float = 0.0,
        options: dict[str, Any] | None = None,
        init_from: str | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_prob: float = 1.0,
        smoothing: float = 0.0,
        teacher: str | None = None,
        teacher_checkpoint: str | None = None,
        distillation: Literal["soft", "hard"] = "soft",
        distillation_weight: float = 0.5,
        temperature: float = 1.0,
        **task: Any,
    ) -> None:
        super().__init__(**task)
        self.save_hyperparameters()
        self.num_classes = num_classes
        self.model = build_model(backbone, num_classes, attention, tie_qk, drop_path, options)
        self.init_from: str | None = init_from
        self.smoothing = smoothing
        self.mix = (
            Mixup(mixup, cutmix, prob=mix_prob, label_smoothing=smoothing, num_classes=num_classes)
            if mixup or cutmix
            else None
        )
        self.teacher_name, self.teacher_checkpoint = teacher, teacher_checkpoint
        self.distillation, self.temperature = distillation, temperature
        self.distillation_weight = distillation_weight
        self.teacher: Teacher | None = None
        self.scores = nn.ModuleList()
        self.freeze_parts()

    @property
    def images(self) -> ImageData | None:
        """The data module, if it is ours."""
        data = getattr(self.trainer, "datamodule", None)
        return data if isinstance(data, ImageData) else None

    def setup(self, stage: str) -> None:
        if self.init_from and Path(self.init_from).is_file():
            self._initialise()
        if stage != "fit":
            return
        data = self.images
        if self.mix and data and data.images_per_process() % 2:
            raise ValueError(
                f"mixup and cutmix need an even number of images in a process, and "
                f"--data.batch_size {data.batch_size} gives {data.images_per_process()}"
            )
        if self.teacher_name:
            path = Path(self.teacher_checkpoint) if self.teacher_checkpoint else None
            if data is None:
                raise ValueError("a teacher needs to know how images are normalised: use ImageData")
            normal = data.preparation
            self.teacher = Teacher(
                self.teacher_name, path, self.num_classes, normal["mean"], normal["std"]
            )

    def _initialise(self) -> None:
        """Once: what follows goes on with the weights that are there."""
        if self.init_from:
            taken = initialise(self.model, Path(self.init_from))
            if self.trainer.is_global_zero:
                print(taken)
            self.init_from = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.init_from = None  # the checkpoint has all weights

    def on_fit_start(self) -> None:
        self._initialise()  # refuses a file that is not there, unless there was a checkpoint
        if self.teacher:
            self.teacher.to(self.device)

    def on_validation_start(self) -> None:
        self._initialise()

    on_test_start = on_validation_start

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
        self.check_finite(loss, batch.indices)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        loaders = self.trainer.val_dataloaders or self.trainer.test_dataloaders or []
        while len(self.scores) < len(loaders):
            self.scores.append(Scores(self.num_classes))
        self.scores.to(self.device)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._score("val", batch, dataloader_idx)

    on_test_epoch_start = on_validation_epoch_start

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._score("test", batch, dataloader_idx)

    def _score(self, part: str, batch: Batch, loader: int) -> None:
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what prediction needs to know: how images are prepared, what classes are called."""
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


def build_model(
    backbone: str,
    num_classes: int,
    attention: str | None = None,
    tie_qk: bool | None = None,
    drop_path: float = 0.0,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """A model of timm; a name that it does not know is refused with those that are near.

    Another attention, or Q = K, is put into timm's own models, and passed on to all others.
    """
    if not timm.is_model(backbone):
        near = get_close_matches(backbone, timm.list_models(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"timm has no model {backbone!r}{hint}")

    def create(**more: Any) -> nn.Module:
        return timm.create_model(
            backbone,
            num_classes=num_classes,
            drop_path_rate=drop_path,
            **(options or {}),
            **more,
        )

    chosen: dict[str, Any] = {"attention": attention, "tie_qk": tie_qk}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    package = timm.model_entrypoint(backbone).__module__.partition(".")[0]
    if package == "softmaxfree":
        return create(**chosen)
    model = create()
    if package != "timm" and not replaceable(model):
        return create(**chosen) if chosen else model
    if attention:
        given = {} if tie_qk is None else {"tie_qk": tie_qk}
        replace_attention(model, attention, measure=False, **given)
    elif tie_qk:
        make_tied(model)
    return model
