"""Checkpoints of small models, as a run writes them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from softmaxfree.layers.multihead import MultiHeadAttention
from softmaxfree.models.build import BackboneConfig, build_model

WriteCheckpoint = Callable[..., Path]

SMALL = {"embed_dims": (16, 16, 24, 24), "depths": (1, 1, 1, 1), "num_heads": (2, 2, 3, 3)}


@pytest.fixture(scope="session")
def write_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> WriteCheckpoint:
    """Of an attention, for 16 x 16 pixels; untrained, but with rows that are not even."""
    root = tmp_path_factory.mktemp("runs")

    def write(attention: str, run: str = "run", classes: list[str] | None = None) -> Path:
        path = root / f"{run}-{attention}" / "last.ckpt"
        if path.exists():
            return path
        options = SMALL | {"img_size": 32}
        classes = classes or list("0123456789")
        torch.manual_seed(len(run))
        model = build_model(BackboneConfig("softpp_nano", attention, options=options), len(classes))
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, MultiHeadAttention):
                    for projection in (layer.q, layer.k):
                        if projection is not None:
                            projection.weight *= 50
        path.parent.mkdir()
        torch.save(
            {
                "hyper_parameters": {
                    "backbone": "softpp_nano",
                    "num_classes": len(classes),
                    "attention": attention,
                    "tie_qk": None,
                    "options": options,
                },
                "images": {
                    "size": 16,
                    "classes": classes,
                    "crop_pct": 1.0,
                    "interpolation": "bicubic",
                    "mean": [0.5] * 3,
                    "std": [0.5] * 3,
                },
                "state_dict": {f"model.{name}": x for name, x in model.state_dict().items()},
            },
            path,
        )
        return path

    return write
