"""`softmaxfree bench detection`: detectors on one large image, and their sizes in the paper."""

from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ...models.build import BackboneConfig
from ...models.cost import Cost, cost_of
from ...models.detectors import build_detector
from ..paper import BACKBONES, DETECTION
from ..results import Column, Note, Page, Row, columns
from .runner import GROWING, SWIN, Benchmark, Entry, image_table

SIZE = (800, 1333)
CLASSES = 80
REPEATS = 2

DETECTORS = {"retinanet": "RetinaNet", "mask_rcnn": "Mask R-CNN"}
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("softpp_tiny, 49 landmarks", "softpp_tiny", {"num_landmarks": 49}),
    ("softpp_small, 49 landmarks", "softpp_small", {"num_landmarks": 49}),
    ("softpp_small, ratios", "softpp_small", GROWING),
    (SWIN, "swin_tiny_patch4_window7_224", {}),
    ("PVTv2-B1", "pvt_v2_b1", {}),
    ("PVTv2-B2", "pvt_v2_b2", {}),
]
"""Title, backbone and options of every detector that is measured."""

NOTES = f"""\
Best of {REPEATS} interleaved repeats, float32. "/ Swin-T" is the time as a multiple of that of the
same detector on Swin-T: below 1 is faster. Only such ratios carry over to other machines.
Multiply-adds are those of the whole forward pass; "inverse" is the part of them that inverts
landmark matrices. MB is the peak of a fresh process, libraries and weights included. With
"ratios" the number of landmarks grows with the image.

Weights are untrained. Mask R-CNN sorts its proposals, suppresses those that overlap and passes
1,000 of them through its box head: that is in the numbers. No object is found, so that
suppressing boxes of a class and computing masks are not."""

NOTES_ON_SIZES = """\
"rest" is all but the body; beside it, the paper's detector less its classifier, both rounded.
[Detection](../docs/detection.md#what-was-measured) says where the differences may come from."""


def bench_detection(threads: int = 1, out: Path = Path("results")) -> Row:
    """Measure detectors on one image of 800 x 1333 pixels (7 minutes).

    RetinaNet and Mask R-CNN on SOFT++, Swin-T and PVTv2, with untrained weights: parameters,
    multiply-adds, time in turns, memory of a fresh process; and their sizes beside the paper's.
    One image takes 7 to 16 seconds, and each detector passes four. Prints tables and writes them
    as JSON, CSV and Markdown.

    Args:
        threads: Threads to compute with; ratios are most reliable with 1.
        out: Folder for the results.
    """
    bench = Benchmark(threads, out)
    entries = [
        Entry(
            {"title": title, "detector": name, "backbone": body, "options": options}
            | {"size": list(SIZE)},
            partial(prepare_detector, name, body, options, SIZE),
            cost_of_detecting,
        )
        for name in DETECTORS
        for title, body, options in BODIES
    ]
    rows = bench.measure(entries, "inference", REPEATS, memory="process")
    return bench.publish("detection", rows, page, parameters=sizes())


def prepare_detector(
    name: str, backbone: str, options: dict[str, Any], size: tuple[int, int]
) -> partial[Row]:
    """A pass of one image of noise, which is padded, but neither made larger nor smaller."""
    torch.manual_seed(0)
    low, high = min(size), max(size)
    body = BackboneConfig(backbone, options=options)
    detector = build_detector(name, CLASSES, body, min_size=low, max_size=high)
    picture = torch.rand(3, *size, generator=torch.Generator().manual_seed(0))
    return partial(detect, detector.eval(), picture)


def detect(model: nn.Module, picture: Tensor) -> Row:
    """How many objects the model finds on an image (3, H, W)."""
    with torch.no_grad():
        (found,) = model([picture])
    return {"objects": len(found["boxes"])}


def cost_of_detecting(call: partial[Row]) -> Cost:
    model, picture = call.args
    return cost_of(model, [picture])


def sizes() -> list[Row]:
    """Parameters of the detectors, and of their backbones with the classifier and without it."""

    def parameters(model: Any) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    printed = [
        (detector, backbone, row.parameters_m)
        for detector, rows in DETECTION.items()
        for size, row in rows.items()
        for backbone in ([f"{size}_fudan", size] if size == "softpp_tiny" else [size])
    ]
    rows = []
    for detector, backbone, paper in tqdm(printed, desc="counting", unit="model", leave=False):
        with torch.device("meta"):
            model = build_detector(detector, CLASSES, backbone)
            classifier = timm.create_model(backbone)
        rows.append(
            {
                "detector": detector,
                "backbone": backbone,
                "parameters": parameters(model),
                "paper_m": paper,
                "body": parameters(model.backbone.body),  # type: ignore[union-attr]
                "classification": parameters(classifier),
                "paper_classification_m": BACKBONES[backbone].parameters_m,
            }
        )
    return rows


def page(content: Row) -> Page:
    def rest(row: Row) -> int:
        count: int = row["parameters"] - row["body"]
        return count

    parameters = columns(
        content["parameters"],
        Column("detector", lambda row: DETECTORS[row["detector"]]),
        Column("backbone", "backbone"),
        Column("M params", "parameters", 2, 1e6),
        Column("paper", "paper_m"),
        Column("body", "body", 2, 1e6),
        Column("rest", rest, 2, 1e6),
        Column("paper", lambda row: row["paper_m"] - row["paper_classification_m"]),
        Column("with classifier", lambda row: rest(row) + row["classification"], 2, 1e6),
    )
    return Page(
        f"Detection: one image of {SIZE[0]} x {SIZE[1]} pixels",
        [
            image_table(content["rows"], "detector", DETECTORS),
            Note(NOTES),
            Note("## Parameters beside the paper's"),
            parameters,
            Note(NOTES_ON_SIZES),
        ],
    )
