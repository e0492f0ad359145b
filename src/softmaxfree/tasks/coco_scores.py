"""COCO's average precision by pycocotools, and detections in its JSON format."""

import contextlib
import io
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from ..data.scenes import mask_tools
from ..imports import needs

NAMES = ("AP", "AP50", "AP75", "AP_S", "AP_M", "AP_L")
"""The first six numbers of COCO's summary: over IoU 0.5 to 0.95, at 0.5, at 0.75, by area."""

Detection = dict[str, Any]
"""image_id, category_id, bbox (x, y, width, height), score and, with masks, segmentation."""


def detections(
    found: dict[str, Tensor], image_id: int, category_ids: list[int], first_label: int = 0
) -> list[Detection]:
    """The detections of torchvision's detector on an image, in the format of COCO's results.

    Args:
        found: boxes (N, 4) as x1 y1 x2 y2, labels (N), scores (N) and, with masks, masks
            (N, 1, H, W) of probabilities.
        category_ids: COCO's number of each class.
        first_label: The detector's number of the first class.
    """
    boxes = found["boxes"].double().cpu()
    boxes[:, 2:] -= boxes[:, :2]
    results: list[Detection] = [
        {
            "image_id": image_id,
            "category_id": category_ids[label - first_label],
            "bbox": box,
            "score": score,
        }
        for box, label, score in zip(
            boxes.tolist(), found["labels"].tolist(), found["scores"].double().tolist()
        )
    ]
    if "masks" in found:
        masks = (found["masks"][:, 0] > 0.5).permute(1, 2, 0).byte().cpu().numpy()
        for result, encoded in zip(results, mask_tools().encode(np.asfortranarray(masks))):
            result["segmentation"] = {**encoded, "counts": encoded["counts"].decode()}
    return results


def average_precision(
    ground_truth: dict[str, Any],
    results: list[Detection],
    image_ids: Iterable[int],
    masks: bool = False,
) -> dict[str, float]:
    """COCO's scores for boxes and, as mask_AP and so on, for masks.

    A score without ground truth, such as AP_S of a data set without small objects, is left out.

    Args:
        ground_truth: Images, annotations and categories, as in COCO's files.
        results: The detections.
        image_ids: The images that count.
        masks: Whether masks are scored too.
    """
    with needs("detection", "scoring detections"):
        from pycocotools.coco import COCO  # type: ignore[import-untyped]
        from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped]

    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its steps
        truth, found = COCO(), COCO()
        truth.dataset = ground_truth
        found.dataset = {**ground_truth, "annotations": []}
        for part in (truth, found):
            part.createIndex()
        if results:  # pycocotools does not take an empty list for no detections
            found = truth.loadRes([dict(result) for result in results])  # loadRes changes them
        scores: dict[str, float] = {}
        for prefix, kind in {"": "bbox", **({"mask_": "segm"} if masks else {})}.items():
            evaluation = COCOeval(truth, found, kind)
            evaluation.params.imgIds = sorted(image_ids)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            measured = zip(NAMES, evaluation.stats.tolist())
            scores |= {prefix + name: value for name, value in measured if value >= 0}
    return scores
