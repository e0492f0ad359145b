"""Every number that is quoted from the paper, to stand beside what is measured."""

from typing import Any, NamedTuple

Row = dict[str, Any]
"""Memory of a batch in GB, millions of parameters, G multiply-adds, images a second, accuracy."""


def _row(memory: float, g: float, training: int, inference: int, top1: float) -> Row:
    return {
        "memory_gb": memory,
        "parameters_m": 13,
        "multiply_adds_g": g,
        "training": training,
        "inference": inference,
        "top1": top1,
    }


LINEARISATION: dict[str, Row] = {
    "softmax": _row(19.0, 3.9, 1073, 3240, 80.0),
    "linformer": _row(11.7, 1.9, 2767, 3779, 78.2),
    "performer": _row(15.0, 2.2, 2037, 3657, 76.1),
    "nystromformer": _row(17.2, 2.0, 1891, 3518, 80.1),
    "soft": _row(15.8, 1.9, 1730, 3436, 80.9),
    "softpp": _row(15.8, 1.9, 1730, 3436, 80.9),
}
"""The table of linear attentions in tiny; a batch of 1024, of 256 for softmax."""

LANDMARKS: dict[int, Row] = {
    36: {"memory_gb": 15.1, "multiply_adds_g": 1.9, "top1": 80.5},
    49: {"memory_gb": 15.8, "multiply_adds_g": 1.9, "top1": 80.9},
    64: {"memory_gb": 16.9, "multiply_adds_g": 2.0, "top1": 80.9},
    81: {"memory_gb": 18.5, "multiply_adds_g": 2.1, "top1": 80.4},
}
"""The ablation of the number of landmarks."""

SAMPLERS: dict[str, Row] = {
    "conv": {"parameters_m": 13.07, "multiply_adds_g": 2.0, "top1": 80.9},
    "random": {"parameters_m": 12.96, "multiply_adds_g": 1.9, "top1": 80.8},
    "biased": {"parameters_m": 12.96, "multiply_adds_g": 1.9, "top1": 79.9},
    "avg": {"parameters_m": 12.96, "multiply_adds_g": 1.9, "top1": 80.8},
}
"""The ablation of how landmarks are made."""


class ImageNetRow(NamedTuple):
    """A row of the ImageNet table (tab:classification)."""

    title: str
    family: str
    parameters_m: float
    multiply_adds_g: float | None
    top1: float
    model: str = ""
    """timm's name, if that is the same model and it is measured here at the same side."""
    side: int = 224


IMAGENET = [
    ImageNetRow("ResNet-18", "ResNet", 11, 1.9, 69.8),
    ImageNetRow("PVT-Tiny", "PVT", 13, 1.9, 75.1),
    ImageNetRow("ConViT-Ti+", "ConViT", 10, 2.0, 76.7),
    ImageNetRow("CoaT-Lite Mini", "CoaT-Lite", 11, 2.0, 78.9),
    ImageNetRow("LambdaNets-50", "LambdaNets", 16, None, 78.9),
    ImageNetRow("ViP-Ti", "ViP", 13, 1.7, 79.0),
    ImageNetRow("SOFT-Tiny", "SOFT", 13, 1.9, 80.9, "soft_tiny_fudan"),
    ImageNetRow("SOFT++-Tiny", "SOFT++", 13, 1.9, 80.9, "softpp_tiny_fudan"),
    ImageNetRow("ResNet-50", "ResNet", 25, 4.1, 78.5, "resnet50"),
    ImageNetRow("PVT-Small", "PVT", 24, 4.0, 79.8),
    ImageNetRow("Swin-T", "Swin", 29, 4.5, 81.3, "swin_tiny_patch4_window7_224"),
    ImageNetRow("Twins-SVT-S", "Twins-SVT", 24, 3.7, 81.7),
    ImageNetRow("CoAtNet-0", "CoAtNet", 25, 4.2, 81.6),
    ImageNetRow("DeiT III-S", "DeiT III", 22, 4.6, 81.4, "deit3_small_patch16_224"),
    ImageNetRow("SwinV2-T", "SwinV2", 29, 4.5, 81.7, side=256),
    ImageNetRow("ConvNeXt-T", "ConvNeXt", 29, 4.5, 82.1, "convnext_tiny"),
    ImageNetRow("SOFT-Small", "SOFT", 27, 4.5, 82.5, "soft_small"),
    ImageNetRow("SOFT++-Small", "SOFT++", 27, 4.5, 82.6, "softpp_small"),
    ImageNetRow("ResNet-101", "ResNet", 44, 7.9, 79.8),
    ImageNetRow("PVT-Medium", "PVT", 44, 7.0, 81.2),
    ImageNetRow("ViT-Small/16", "ViT", 48, 9.9, 80.8),
    ImageNetRow("Swin-S", "Swin", 50, 8.7, 83.0),
    ImageNetRow("ConvNeXt-S", "ConvNeXt", 50, 8.7, 83.1),
    ImageNetRow("CoAtNet-1", "CoAtNet", 42, 8.4, 83.3),
    ImageNetRow("SwinV2-S", "SwinV2", 50, 8.7, 83.6, side=256),
    ImageNetRow("SOFT-Medium", "SOFT", 48, 8.7, 83.2, "soft_medium"),
    ImageNetRow("SOFT++-Medium", "SOFT++", 48, 8.7, 83.7, "softpp_medium"),
    ImageNetRow("CaiT-S36", "CaiT", 88, 13.9, 83.3),
    ImageNetRow("Swin-B", "Swin", 88, 15.4, 83.3),
    ImageNetRow("Twins-SVT-L", "Twins-SVT", 99, 14.8, 83.3),
    ImageNetRow("DeiT III-B", "DeiT III", 87, 15.5, 83.8),
    ImageNetRow("ConvNeXt-B", "ConvNeXt", 89, 15.4, 83.8),  # printed as ConvNext-S
    ImageNetRow("CoAtNet-2", "CoAtNet", 75, 15.7, 84.1),
    ImageNetRow("SwinV2-B", "SwinV2", 88, 15.4, 84.1, side=256),
    ImageNetRow("SOFT-Large", "SOFT", 85, 15.4, 83.6, "soft_large"),
    ImageNetRow("SOFT++-Large", "SOFT++", 85, 15.4, 84.1, "softpp_large"),
]
"""The ImageNet table. Three models of timm that are measured here differ from their rows:
coatnet_0_rw_224 has 27 M parameters, vit_small_patch16_224 has 22 M, and the accuracy of SwinV2-T
is at 256 x 256."""

BACKBONES = {
    f"{row.family.lower().replace('+', 'p')}_{row.title.rpartition('-')[2].lower()}": row
    for row in IMAGENET
    if row.family in ("SOFT", "SOFT++")
}
BACKBONES |= {f"{name}_fudan": BACKBONES[name] for name in ("soft_tiny", "softpp_tiny")}
"""The ImageNet rows of SOFT and SOFT++ by the names of the models."""

RESOLUTION = {
    "softpp": {224: 82.6, 384: 82.6, 512: 80.2},
    "soft": {224: 82.5, 384: 33.7, 512: 0.14},
}
"""Top-1 accuracy by the side of the test images; training is at 224."""

TIED = {"ViT": (80.8, 80.5), "Swin": (81.3, 80.9)}
"""Top-1 accuracy with separate projections for queries and keys, and with a shared one."""

ARCHITECTURE = {"pyramid": (82.4, 80.1), "overlap": (80.9, 78.4)}
"""Top-1 accuracy of SOFT++ with this part and without it."""

DEIT_SMALL = 79.8
"""Top-1 accuracy that the ablation of the pyramid is compared with."""


class Detector(NamedTuple):
    """A row of the COCO tables: millions of parameters, and average precisions in per cent."""

    parameters_m: int
    ap: float
    ap50: float | None = None
    ap75: float | None = None
    mask_ap: float | None = None


DETECTION: dict[str, dict[str, Detector]] = {
    "retinanet": {
        "softpp_tiny": Detector(23, 41.9, 62.7, 44.7),
        "softpp_small": Detector(38, 43.7, 64.9, 46.8),
        "softpp_medium": Detector(59, 44.3, 64.7, 47.4),
        "softpp_large": Detector(98, 47.0, 67.8, 50.4),
    },
    "mask_rcnn": {
        "softpp_tiny": Detector(32, 41.2, mask_ap=38.2),
        "softpp_small": Detector(48, 43.8, mask_ap=40.1),
        "softpp_medium": Detector(69, 46.6, mask_ap=42.0),
        "softpp_large": Detector(106, 47.0, mask_ap=42.2),
    },
}


class Segmenter(NamedTuple):
    """UperNet on a backbone: M parameters, G multiply-adds, mean IoU in per cent."""

    parameters_m: int
    multiply_adds_g: int
    miou: float | None = None


class SegmentationData(NamedTuple):
    """A data set of the segmentation tables: classes, the side of a crop, rows by backbone."""

    classes: int
    side: int
    rows: dict[str, Segmenter]


SEGMENTATION: dict[str, SegmentationData] = {
    "ADE20K": SegmentationData(
        150,
        512,
        {
            "softpp_small": Segmenter(60, 237, 46.5),
            "softpp_medium": Segmenter(81, 260, 48.9),
            "softpp_large": Segmenter(121, 301, 49.2),
            "swin_tiny_patch4_window7_224": Segmenter(60, 236),
            "convnext_tiny": Segmenter(60, 235),
        },
    ),
    "Cityscapes": SegmentationData(
        19,
        768,
        {
            "softpp_small": Segmenter(60, 545, 81.2),
            "softpp_medium": Segmenter(81, 607, 82.0),
            "softpp_large": Segmenter(121, 899, 82.6),
        },
    ),
}

LRA: dict[str, dict[str, float]] = {
    "softmax": {"listops": 37.10, "text": 65.02, "retrieval": 79.35, "image": 38.20},
    "reformer": {"listops": 19.05, "text": 64.88, "retrieval": 78.64, "image": 43.29},
    "linformer": {"listops": 37.25, "text": 55.91, "retrieval": 79.37, "image": 37.84},
    "performer": {"listops": 18.80, "text": 63.81, "retrieval": 78.62, "image": 37.07},
    "nystromformer": {"listops": 37.15, "text": 65.52, "retrieval": 79.56, "image": 41.58},
    "soft": {"listops": 37.40, "text": 63.49, "retrieval": 81.77, "image": 46.91},
}
"""Accuracy on the Long Range Arena in per cent; the paper leaves pathfinder out."""
