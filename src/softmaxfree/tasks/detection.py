"""Detection and instance segmentation: RetinaNet and Mask R-CNN over any pyramid of timm's."""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data import DetectionData
from ..data.detection import SceneBatch
from ..data.scenes import Scenes
from ..errors import UserError, check_size
from ..files import write_atomically
from ..models.build import BackboneConfig
from ..models.detectors import FIRST_LABEL, build_detector
from ..models.weights import Weights
from .coco_scores import Detection as Found
from .coco_scores import average_precision, detections
from .task import Task


class Detection(Task):
    """Learns boxes and classes of objects and, with Mask R-CNN, their masks.

    Args:
        detector: retinanet, or mask_rcnn for masks too.
        backbone: Name of a model in timm with maps of halving sides, such as softpp_tiny.
        num_classes: Number of classes in the data, without a background.
        attention: Attention to use in the backbone; see Classification.
        tie_qk: Whether queries and keys share one projection; for our models, and timm's ViT, DeiT
            and Swin.
        drop_path: Probability of leaving out a block, rising with depth.
        options: Further arguments of the backbone.
        width: Channels of the feature pyramid and of the heads.
        size: Shorter side that images are resized to in evaluation.
        max_size: Largest longer side after that.
        mean: Mean that images in [0, 1] are normalised with.
        std: Standard deviation that they are normalised with.
        detector_options: Further arguments of torchvision's RetinaNet or MaskRCNN.
        results: File to write the detections in validation to, in COCO's JSON format.
        task: Arguments of Task: optimiser, schedule, moving average, weights to start from.
    """

    monitor = "val/AP"
    curves: ClassVar[dict[str, list[str]]] = {
        "loss": ["train/loss_epoch"],
        "average precision in validation": ["val/AP", "val/AP50", "val/mask_AP", "val/mask_AP50"],
    }

    def __init__(
        self,
        detector: Literal["retinanet", "mask_rcnn"] = "retinanet",
        backbone: str = "softpp_nano",
        num_classes: int = 80,
        attention: str | None = None,
        tie_qk: bool | None = None,
        drop_path: float = 0.0,
        options: dict[str, Any] | None = None,
        width: int = 256,
        size: int = 800,
        max_size: int = 1333,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        detector_options: dict[str, Any] | None = None,
        results: str | None = None,
        **task: Any,
    ) -> None:
        super().__init__(**task)
        check_size(size, "--model.size")
        check_size(max_size, "--model.max_size")
        self.save_hyperparameters()
        self.start_from(backbone)
        self.num_classes, self.learns_masks = num_classes, detector == "mask_rcnn"
        self.first_label = FIRST_LABEL[detector]
        self.model = build_detector(
            detector,
            num_classes,
            BackboneConfig(backbone, attention, tie_qk, drop_path, options),
            width,
            min_size=size,
            max_size=max_size,
            image_mean=list(mean),
            image_std=list(std),
            _skip_resize=True,  # in training: the data module has resized the images
            **(detector_options or {}),
        )
        self.results = results
        self.found: list[Found] = []
        self.seen: list[int] = []
        self.truth: dict[str, dict[str, Any]] = {}
        self.freeze_parts()

    def initialised(self, weights: Weights) -> nn.Module:
        """The detector for a detector's weights, else the backbone."""
        is_detector = any("backbone.body." in name for name in weights.state)
        return self.model if is_detector else self.model.backbone.body  # type: ignore[union-attr, return-value]

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        """Boxes, labels, scores and masks of images (3, H, W) of uint8.

        One image at a time: padded to a common size, they would depend on each other.
        """
        return [self.model([as_float(image)])[0] for image in images]

    def training_step(self, batch: SceneBatch, batch_idx: int) -> Tensor:
        targets = [
            {**target, "labels": target["labels"] + self.first_label}
            for target in batch.targets
            if target is not None
        ]
        losses: dict[str, Tensor] = self.model([as_float(i) for i in batch.images], targets)
        loss = self.logged(torch.stack(list(losses.values())).sum(), batch.indices)
        for name, value in losses.items():
            self.log(f"train/{name}", value, on_step=True, batch_size=len(batch.images))
        return loss

    def on_validation_epoch_start(self) -> None:
        self.found, self.seen = [], []

    on_test_epoch_start = on_validation_epoch_start

    def _scenes(self, part: str) -> Scenes:
        if not isinstance(self.data, DetectionData):
            raise UserError("detections are scored against the scenes of DetectionData")
        scenes: Scenes = self.data.sources[part]
        return scenes

    def score(self, batch: SceneBatch, part: str, loader: int) -> None:
        scenes = self._scenes(part)
        there = [n for n, target in enumerate(batch.targets) if target is not None]
        for n, found in zip(there, self([batch.images[n] for n in there])):
            image_id = scenes.image_ids[int(batch.indices[n])]
            self.seen.append(image_id)
            self.found += detections(found, image_id, scenes.category_ids, self.first_label)

    def log_scores(self, part: str) -> None:
        """Scores the detections of all processes, in the first process, for all of them."""
        seen, found = _gathered(self.seen), _gathered(self.found)
        shared: list[dict[str, float]] = [{}]
        if self.global_rank == 0:
            if part not in self.truth:
                self.truth[part] = self._scenes(part).ground_truth()
            shared = [average_precision(self.truth[part], found, seen, self.learns_masks)]
            if self.results and not self.trainer.sanity_checking:
                write_atomically(Path(self.results), json.dumps(found))
        if dist.is_initialized():
            dist.broadcast_object_list(shared, src=0)
        for name, value in shared[0].items():
            self.log(f"{part}/{name}", value, prog_bar=name == "AP50", rank_zero_only=False)

    def closing_lines(self, scores: dict[str, Any]) -> list[str]:
        kinds = {"boxes": "", **({"masks": "mask_"} if self.learns_masks else {})}
        lines = [
            f"AP of {kind:9}" + ", ".join(
                f"{name.removeprefix(prefix)} {value * 100:.1f}"
                for name, value in scores.items()
                if name.startswith("mask_") == bool(prefix)
            )
            for kind, prefix in kinds.items()
        ]  # fmt: skip
        kind, prefix = list(kinds.items())[-1]
        last = scores.get(f"{prefix}AP50", 0.0)
        return [*lines, f"held-out AP50 of {kind}: {last * 100:.1f} %"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the names of classes, for prediction."""
        data = self.data
        if isinstance(data, DetectionData) and data.classes:
            checkpoint["objects"] = {"classes": data.classes}


def as_float(image: Tensor) -> Tensor:
    """(3, H, W) of uint8 -> the same in [0, 1]."""
    return image.float() / 255


def _gathered(mine: list[Any]) -> list[Any]:
    """The lists of all processes in one."""
    if not dist.is_initialized():
        return mine
    lists: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, mine)
    return [entry for part in lists for entry in part]
