"""The models that are compared, by name, and what all of them are trained with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...models.build import BackboneConfig, build_model

SIDE = 32
"""Of CIFAR-10."""
SIZES = ("32", "48", "64")
"""Sides of the test images, in pixels; the training size first."""


@dataclass(frozen=True)
class Contestant:
    """A model, in the terms of `softmaxfree fit`."""

    attention: str | None = None
    tie_qk: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    backbone: str = "softpp_nano"
    all_sizes: bool = False
    """Score it at all of `SIZES`, which takes half as long as the training."""

    def build(self, classes: int) -> nn.Module:
        config = BackboneConfig(self.backbone, self.attention, self.tie_qk, options=self.options)
        return build_model(config, classes)

    def arguments(self) -> list[str]:
        """The arguments of `softmaxfree fit` beside the recipe."""
        given: dict[str, Any] = {
            "--model.backbone": self.backbone if self.backbone != "softpp_nano" else None,
            "--model.attention": self.attention,
            "--model.tie_qk": None if self.tie_qk is None else json.dumps(self.tie_qk),
            "--model.options": json.dumps(self.options) if self.options else None,
            "--data.eval_sizes": f"[{','.join(SIZES)}]" if self.all_sizes else None,
        }
        return [f"{name}={value}" for name, value in given.items() if value is not None]


@dataclass(frozen=True)
class Budget:
    """What all contestants of an experiment are trained with, and where their runs are recorded."""

    name: str
    """Of the folder of runs and the file of records; empty for those of the paper's claims."""
    contestants: Mapping[str, Contestant]
    about: str
    """One sentence: data, steps."""
    recipe: str = "reproduction/cifar10.yaml"
    arguments: tuple[str, ...] = ()
    """Of `softmaxfree fit`, beside the recipe."""
    classes: int = 10
    side: int = SIDE
    """Of the images in training, in pixels."""
    seeds: tuple[int, ...] = (0, 1, 2)
    corrected: bool = False
    """Whether the 5 % of wrong verdicts are shared among the claims of an experiment."""

    @property
    def records(self) -> str:
        return f"{self.name or 'runs'}.jsonl"


_PLAIN_GRID = {"img_size": SIDE, "patch_size": 4, "embed_dim": 80, "depth": 5, "num_heads": 5}
"""A model without a pyramid that costs as much as softpp_nano."""
_VIT: dict[str, Any] = {
    "backbone": "vit_tiny_patch16_224",
    "options": _PLAIN_GRID | {"dynamic_img_size": True},
}
_SWIN: dict[str, Any] = {
    "backbone": "swin_tiny_patch4_window7_224",
    "options": {
        "img_size": SIDE, "patch_size": 2, "window_size": 4, "embed_dim": 32,
        "depths": [1, 1, 2, 1], "num_heads": [2, 4, 8, 8], "strict_img_size": False,
    },
}  # fmt: skip


def _softpp(**options: Any) -> Contestant:
    return Contestant(options=options)


_LINEAR = ("linformer", "performer", "nystromformer")
_PLAIN = {"value_conv": 0}

CONTESTANTS: dict[str, Contestant] = {
    "softpp": Contestant(all_sizes=True),
    "soft": Contestant("soft", all_sizes=True),
    **{name: Contestant(name) for name in ("softmax", *_LINEAR)},
    **{
        f"{name}, no value convolution": Contestant(name, options=_PLAIN)
        for name in ("softpp", "soft", "softmax", *_LINEAR)
    },
    "gaussian, not normalised": Contestant(
        "gaussian", options={"attention_options": {"normalize": False}}
    ),
    "gaussian, normalised": Contestant(
        "gaussian", options={"attention_options": {"normalize": True}}
    ),
    "softpp, 16 landmarks": Contestant(options={"num_landmarks": 16}, all_sizes=True),
    "soft, 16 landmarks": Contestant("soft", options={"num_landmarks": 16}, all_sizes=True),
    "softpp, 4 landmarks": _softpp(num_landmarks=4),
    "softpp, 64 landmarks": _softpp(num_landmarks=64),
    "softmax, tied": Contestant("softmax", tie_qk=True),
    "ViT": Contestant(**_VIT),
    "ViT, tied": Contestant(tie_qk=True, **_VIT),
    "Swin": Contestant(**_SWIN),
    "Swin, tied": Contestant(tie_qk=True, **_SWIN),
    "softpp, averages": _softpp(sampler="avg"),
    "softpp, random tokens": _softpp(sampler="random"),
    "softpp, first tokens": _softpp(sampler="biased"),
    "softpp, no overlap": _softpp(overlap=False),
    "softpp, softmax in stage 4": _softpp(stage4="softmax"),
    "softpp, plain landmarks": _softpp(attention_options={"landmark_norm": False}),
    "softpp, newton, 20 steps": _softpp(inverse="newton", iters=20),
    "softpp, newton, 5 steps": _softpp(inverse="newton", iters=5),
    "softpp, backtrack, 20 steps": _softpp(inverse="backtrack", iters=20),
    "softpp, no pyramid": Contestant(backbone="softpp_vit_small", options=_PLAIN_GRID),
    # Beyond the paper. A smaller hidden layer pays for a gate or for more landmarks.
    "softpp, pre-norm": _softpp(pre_norm=True),
    "softpp, position by convolution": _softpp(position="conv"),
    "softpp, gated": _softpp(attention_options={"gate": True}, mlp_ratios=3.5),
    "softpp, value kernels by channel": _softpp(attention_options={"value_conv_per_channel": True}),
    "softpp, more landmarks": _softpp(num_landmarks=36, mlp_ratios=3.5),
}
"""By their names in the tables."""

PAPER = Budget(
    "",
    CONTESTANTS,
    "softpp_nano (1 M parameters) with what the contestant's name says, trained on CIFAR-10 for "
    "400 steps of 128 images from random weights, recipes/reproduction/cifar10.yaml",
)
