"""What is trained: options of `softmaxfree fit` by name, the same recipe and steps for all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.trained import TrainedRun, config
from ..files import write_atomically

RECIPE = "reproduction/cifar10.yaml"
SEEDS = (0, 1, 2)
SIZES = ("32", "48", "64")
"""Sides of the test images; that of training first."""
GUESSING = 0.1
"""The accuracy of a run that came to nothing."""

_VIT = (
    "--model.backbone=vit_tiny_patch16_224",
    "--model.options={img_size: 32, patch_size: 4, embed_dim: 128, depth: 5, num_heads: 4, "
    "dynamic_img_size: true}",
)
_SWIN = (
    "--model.backbone=swin_tiny_patch4_window7_224",
    "--model.options={img_size: 32, patch_size: 2, window_size: 4, embed_dim: 32, "
    "depths: [1, 1, 2, 1], num_heads: [2, 4, 8, 8], strict_img_size: false}",
)


_LARGER = ("--data.eval_sizes=[32,48,64]",)
"""Scored at all of SIZES, which takes as long as half of the training."""


def _attention(name: str, **options: str) -> tuple[str, ...]:
    return (f"--model.attention={name}", *_options(**options))


def _options(**options: str) -> tuple[str, ...]:
    return tuple(f"--model.options.{name}={value}" for name, value in options.items())


_LINEAR = ("soft", "softmax", "linformer", "performer", "nystromformer")

CONTESTANTS: dict[str, tuple[str, ...]] = {
    "softpp": _LARGER,
    "soft": (*_attention("soft"), *_LARGER),
    **{name: _attention(name) for name in _LINEAR if name != "soft"},
    "softpp, no value convolution": _options(value_conv="0"),
    **{f"{name}, no value convolution": _attention(name, value_conv="0") for name in _LINEAR},
    "gaussian, not normalised": _attention("gaussian", attention_options="{normalize: false}"),
    "gaussian, normalised": _attention("gaussian", attention_options="{normalize: true}"),
    "softpp, 16 tokens": (*_options(tokens="16"), *_LARGER),
    "soft, 16 tokens": (*_attention("soft", tokens="16"), *_LARGER),
    "softpp, 4 tokens": _options(tokens="4"),
    "softpp, 36 tokens": _options(tokens="36"),
    "softpp, 64 tokens": _options(tokens="64"),
    "softmax, tied": (*_attention("softmax"), "--model.tie_qk=true"),
    "softpp, untied": ("--model.tie_qk=false",),
    "ViT": _VIT,
    "ViT, tied": (*_VIT, "--model.tie_qk=true"),
    "Swin": _SWIN,
    "Swin, tied": (*_SWIN, "--model.tie_qk=true"),
    "softpp, averages": _options(sampler="avg"),
    "softpp, random tokens": _options(sampler="random"),
    "softpp, first tokens": _options(sampler="biased"),
    "softpp, no overlap": _options(overlap="false"),
    "softpp, softmax in stage 4": _options(stage4="softmax"),
    "softpp, plain bottleneck tokens": _options(attention_options="{landmark_norm: false}"),
    "softpp, newton, 20 steps": _options(inverse="newton", iters="20"),
    "softpp, newton, 5 steps": _options(inverse="newton", iters="5"),
    "softpp, backtrack, 20 steps": _options(inverse="backtrack", iters="20"),
    "softpp, no pyramid": (
        "--model.backbone=softpp_vit_small",
        "--model.options={img_size: 32, patch_size: 4, embed_dim: 128, depth: 5, num_heads: 4}",
    ),
}
"""Further arguments of each, by what tables call it."""


@dataclass(frozen=True)
class ContestantRun(TrainedRun):
    """One whose result is kept in a file of its own: a run that has one is not trained again.

    It may diverge, which is a result: it scores as guessing does.
    """

    record: Path

    def train(self, threads: int) -> None:
        told = self.told()
        if self.record.is_file():
            self.refuse_another(told)
            return
        try:
            super().train(threads)
        except RuntimeError as error:
            if "the loss is" not in str(error):
                raise
            told = super().told()
            told |= {"diverged": str(error), "scores": {"accuracy": dict.fromkeys(SIZES, GUESSING)}}
        else:
            told = super().told()
        self.record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.record, json.dumps(told, indent=1) + "\n")

    def told(self) -> dict[str, Any]:
        return json.loads(self.record.read_text()) if self.record.is_file() else super().told()


def contestant_runs(
    name: str,
    runs: Path,
    records: Path,
    arguments: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
) -> list[ContestantRun]:
    """One for each seed. Experiments that have a contestant in common share its runs.

    Args:
        name: In `CONTESTANTS`.
        runs: Folder of all runs.
        records: Folder of what they came to.
        arguments: Further ones, the same for all contestants.
        seeds: Of the runs.
    """
    folder = name.replace(", ", "-").replace(" ", "_")
    return [
        ContestantRun(
            runs / f"{folder}-{seed}",
            (config(RECIPE), *CONTESTANTS[name], f"--seed_everything={seed}", *arguments),
            records / f"{folder}-{seed}.json",
        )
        for seed in seeds
    ]
