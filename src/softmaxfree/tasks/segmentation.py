"""Semantic segmentation: a class for every pixel, by UperNet or another decoder."""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix

from ..data import SegmentationData
from ..data.label_maps import IGNORE
from ..data.segmentation import SegmentationBatch
from ..errors import UserError, check_size, visible
from ..models.build import BackboneConfig
from ..models.weights import Weights
from ..ops.tracing import ceil_div
from .task import Task
from .windows import sliding_logits


class Segmentation(Task):
    """Learns the class of every pixel.

    Args:
        decoder: upernet; fpn, pspnet or deeplabv3plus; or setr_pup, for a backbone without a
            pyramid such as softpp_vit_small.
        backbone: Name of a model in timm, such as softpp_small.
        num_classes: Number of classes in the data.
        attention: Attention to use in the backbone; see Classification.
        tie_qk: Whether queries and keys share one projection; for our models, and timm's ViT, DeiT
            and Swin.
        drop_path: Probability of leaving out a block, rising with depth.
        options: Further arguments of the backbone.
        width: Channels of the decoder.
        auxiliary: Weight of the loss of a second head, on the map before the last; 0 for none.
        window: Side of the windows that images are cut into in evaluation; whole if not given.
        step: Distance from one window to the next; two thirds of the window if not given.
        mean: Mean that images in [0, 1] are normalised with.
        std: Standard deviation that they are normalised with.
        task: Arguments of Task: optimiser, schedule, moving average, weights to start from.
    """

    monitor = "val/mIoU"
    curves: ClassVar[dict[str, list[str]]] = {
        "loss": ["train/loss_epoch"],
        "in validation": ["val/mIoU", "val/pixel_accuracy"],
    }

    def __init__(
        self,
        decoder: Literal["upernet", "fpn", "pspnet", "deeplabv3plus", "setr_pup"] = "upernet",
        backbone: str = "softpp_nano",
        num_classes: int = 150,
        attention: str | None = None,
        tie_qk: bool | None = None,
        drop_path: float = 0.0,
        options: dict[str, Any] | None = None,
        width: int = 512,
        auxiliary: float = 0.4,
        window: int | None = None,
        step: int | None = None,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        **task: Any,
    ) -> None:
        from ..models.segmenters import build_segmenter  # needs an extra that others do not

        super().__init__(**task)
        check_size(window, "--model.window")
        check_size(step, "--model.step")
        self.save_hyperparameters()
        self.start_from(backbone)
        self.num_classes, self.auxiliary = num_classes, auxiliary
        self.window, self.step = window, step
        if step is not None and window is None:
            raise UserError(f"step {step} is from one window to the next: give --model.window too")
        config = BackboneConfig(backbone, attention, tie_qk, drop_path, options)
        self.model = build_segmenter(decoder, num_classes, config, width, auxiliary > 0)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)
        self.confusion = MulticlassConfusionMatrix(
            num_classes, ignore_index=IGNORE, validate_args=False
        )
        self.freeze_parts()

    def initialised(self, weights: Weights) -> nn.Module:
        """The segmenter for a segmenter's weights, else the backbone."""
        is_segmenter = any("decoder." in name for name in weights.state)
        return self.model if is_segmenter else self.model.body  # type: ignore[return-value]

    def normalised(self, images: Tensor) -> Tensor:
        """Images of uint8 -> normalised images, as the model takes them."""
        return (images.float() / 255 - self.mean) / self.std

    def forward(self, image: Tensor) -> Tensor:
        """Logits (classes, H, W) of an image (3, H, W) of uint8, whole or by windows."""
        images = self.normalised(image).unsqueeze(0)
        if self.window is None:
            return self._segment(images)[0]
        step = self.step or ceil_div(self.window * 2, 3)
        return sliding_logits(self._segment, images, self.window, step)[0]

    def _segment(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)[0]
        return logits

    def training_step(self, batch: SegmentationBatch, batch_idx: int) -> Tensor:
        images = torch.stack(batch.images)
        labels = torch.stack([labels for labels in batch.labels if labels is not None]).long()
        try:
            logits, second = self.model(self.normalised(images))
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UserError(
                "this decoder pools an image to one pixel, and batch normalisation needs two of "
                "them: give --data.batch_size 2 or more for each process and accumulated batch"
            ) from error
        loss = pixel_loss(logits, labels)
        if second is not None:
            loss = loss + self.auxiliary * pixel_loss(second, labels)
        return self.logged(loss, batch.indices)

    def on_validation_epoch_start(self) -> None:
        self.confusion.reset()

    on_test_epoch_start = on_validation_epoch_start

    def score(self, batch: SegmentationBatch, part: str, loader: int) -> None:
        """Scores one image at a time, at the size of its labels."""
        for image, labels in zip(batch.images, batch.labels):
            if labels is None:
                continue
            logits = self(image).unsqueeze(0)
            if logits.shape[-2:] != labels.shape:
                logits = F.interpolate(logits, labels.shape, mode="bilinear", align_corners=False)
            self.confusion.update(logits.argmax(1)[0], labels.long())

    def log_scores(self, part: str) -> None:
        scores = scores_of(self.confusion.compute(), self.classes)
        for name, value in scores.items():
            self.log(f"{part}/{name}", value, prog_bar=name == "mIoU")

    @property
    def classes(self) -> list[str]:
        found = self.data.classes if self.data else None
        return found or [str(number) for number in range(self.num_classes)]

    def closing_lines(self, scores: dict[str, Any]) -> list[str]:
        lines = [
            f"  {visible(name.removeprefix('IoU/')):24}{value * 100:5.1f} %"
            for name, value in scores.items()
            if name.startswith("IoU/")
        ]
        return [
            "IoU of the classes",
            *lines,
            f"pixel accuracy {scores['pixel_accuracy'] * 100:.1f} %",
            f"held-out mIoU: {scores['mIoU'] * 100:.1f} %",
        ]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the names and colours of classes, for prediction."""
        data = self.data
        if isinstance(data, SegmentationData):
            checkpoint["labels"] = {
                "classes": data.classes,
                "palette": [list(colour) for colour in data.palette],
                "size": data.resize.size,
                "max_size": data.resize.max_size,
            }


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits (B, classes, H, W) over the labels (B, H, W) that count."""
    counted = (labels != IGNORE).sum().clamp(min=1)  # a crop may have none
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / counted


def scores_of(confusion: Tensor, classes: list[str]) -> dict[str, float]:
    """mIoU, pixel accuracy and IoU by class, from a confusion matrix (true class, found class).

    A class that is neither in the labels nor found has no IoU, and does not count in the mean.
    """
    counts = confusion.double().cpu()
    right = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - right
    iou = right / union.clamp(min=1)
    seen = union > 0
    by_class = {f"IoU/{classes[n]}": iou[n].item() for n in seen.nonzero().flatten().tolist()}
    return {
        "mIoU": iou[seen].mean().item() if seen.any() else 0.0,
        "pixel_accuracy": (right.sum() / counts.sum().clamp(min=1)).item(),
        **by_class,
    }
