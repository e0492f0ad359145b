"""`softmaxfree bench models`: backbones against their peers, in inference and in training."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..environment import command_line
from ..files import write_atomically
from ..layers.attention import SoftmaxFreeAttention
from ..layers.samplers import Size
from ..layers.table import ATTENTIONS
from ..models.backbone import check_images
from ..ops.kernel import token_scale
from .contestants import released
from .measure import in_fresh_process, largest_memory, time_interleaved
from .results import provenance, result, table, write_json


class ReleasedAttention(SoftmaxFreeAttention):
    """SOFT++ by the released formula, operation by operation."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, size: Size, context_size: Size, mask: Tensor | None
    ) -> Tensor:
        landmarks, _ = self._sample(q, size, None)
        scale = token_scale(self.head_dim)
        return released(q, v, self.landmark_norm(landmarks * scale) / scale)


ATTENTIONS["released"] = ReleasedAttention


def _in_default_order(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].contiguous(),)


@dataclass(frozen=True)
class Contestant:
    """A model by its timm name and arguments, and whom it is compared with."""

    title: str
    model: str
    against: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    channels_last: bool = True

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = timm.create_model(self.model, **self.arguments)
        if not self.channels_last:
            model.check = partial(check_images, in_chans=3)
            for stage in model.stages:
                stage.embed.register_forward_pre_hook(_in_default_order)
        return model


@dataclass(frozen=True)
class Preset:
    help: str
    contestants: list[Contestant]
    shape: tuple[int, int, int, int]
    repeats: int
    training: bool = False
    memory: bool = False


_SWIN, _PVT, _RELEASED = "Swin-T", "PVTv2-B1", "released formula"
PRESETS = {
    "speed": Preset(
        "images a second at 224 x 224, batch 4",
        [
            Contestant(_SWIN, "swin_tiny_patch4_window7_224"),
            Contestant("softpp_small", "softpp_small", _SWIN),
            Contestant("softpp_small, NCHW", "softpp_small", _SWIN, channels_last=False),
            Contestant(
                "softpp_small, released formula", "softpp_small", _SWIN, {"attention": "released"}
            ),
            Contestant(_PVT, "pvt_v2_b1"),
            Contestant("softpp_tiny_fudan, auto", "softpp_tiny_fudan", _PVT, {"inverse": "auto"}),
        ],
        (4, 3, 224, 224),
        repeats=9,
        training=True,
    ),
    "large": Preset(
        "one image of 800 x 1333 pixels, as in detection",
        [
            Contestant(
                _RELEASED, "softpp_tiny_fudan", arguments={"attention": "released", "pad": "drop"}
            ),
            Contestant(
                "softpp_tiny_fudan, auto", "softpp_tiny_fudan", _RELEASED, {"inverse": "auto"}
            ),
            Contestant(
                "softpp_tiny_fudan, 49 tokens", "softpp_tiny_fudan", _RELEASED,
                {"inverse": "auto", "tokens": 49},
            ),
        ],
        (1, 3, 800, 1333),
        repeats=3,
        memory=True,
    ),
}  # fmt: skip


def run(preset: str, threads: int, out: Path) -> dict[str, Any]:
    """Measures a preset; writes its JSON and Markdown; prints the table."""
    plan = PRESETS[preset]
    torch.set_num_threads(threads)
    images = torch.randn(plan.shape, generator=torch.Generator().manual_seed(0))
    models = {contestant.title: contestant.build() for contestant in plan.contestants}
    rows: list[dict[str, Any]] = [
        {**asdict(contestant), "batch": plan.shape[0]} for contestant in plan.contestants
    ]
    bar = tqdm(total=1 + plan.training + plan.memory, desc=f"bench models, {preset}", leave=False)
    calls: dict[str, Callable[[], object]] = {
        title: partial(_infer, model.eval(), images) for title, model in models.items()
    }
    for row, timing in zip(rows, time_interleaved(calls, plan.repeats, 60).values()):
        row["inference_s"], row["inference_median_s"] = timing.best, timing.median
    bar.update()
    if plan.training:
        calls = {title: partial(_train, model.train(), images) for title, model in models.items()}
        for row, timing in zip(rows, time_interleaved(calls, plan.repeats, 60).values()):
            row["training_s"], row["training_median_s"] = timing.best, timing.median
        bar.update()
    if plan.memory:
        for row, contestant in zip(rows, plan.contestants):
            row["inference_bytes"] = in_fresh_process(
                __name__, preset=preset, title=contestant.title, threads=threads
            )
        bar.update()
    bar.close()
    content = result(command_line(), rows, preset=preset)
    stem = out / f"models-{preset}"
    write_json(stem.with_suffix(".json"), content)
    write_atomically(stem.with_suffix(".md"), markdown(content))
    print(report(content))
    print(f"\nwritten: {stem}.json and .md")
    return content


def _infer(model: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        model(images)


def _train(model: nn.Module, images: Tensor) -> None:
    """A step without the optimiser's part."""
    model.zero_grad()
    labels = torch.arange(images.shape[0])
    nn.functional.cross_entropy(model(images), labels).backward()


def report(content: dict[str, Any], markdown: bool = False) -> str:
    """Images a second, and how many times as many as the peer's."""
    rows = {row["title"]: row for row in content["rows"]}
    kinds = [kind for kind in ("inference", "training") if f"{kind}_s" in content["rows"][0]]
    memory = "inference_bytes" in content["rows"][0]
    header = ["model", "against"]
    for kind in kinds:
        header += [f"{kind} img/s", "ratio"]
    header += ["peak MB"] if memory else []
    lines = []
    for row in content["rows"]:
        line = [row["title"], row["against"]]
        for kind in kinds:
            line.append(f"{row['batch'] / row[f'{kind}_s']:.3g}")
            peer = rows.get(row["against"])
            line.append(f"{peer[f'{kind}_s'] / row[f'{kind}_s']:.2f}" if peer else "")
        if memory:
            taken = row["inference_bytes"]
            line.append("out of memory" if taken is None else f"{taken / 1e6:.0f}")
        lines.append(line)
    return table(header, lines, 2, markdown)


def markdown(content: dict[str, Any]) -> str:
    return f"""\
# Models: {PRESETS[content["preset"]].help}

{provenance(content)}

{report(content, markdown=True)}

Best of interleaved repeats; a ratio above 1 is faster than the model it is compared with. Only
ratios within one run carry over to other machines. A training step is forward, loss and backward.
"released formula" is the attention as the authors' code computes it. "NCHW" has convolutions in
torch's default order of memory in place of channels-last. Peak memory is of a fresh process, all
included.
"""


def _memory_of_one(arguments: dict[str, Any]) -> int:
    """In a process of its own: the most that it ever takes, libraries and weights included."""
    torch.set_num_threads(arguments["threads"])
    plan = PRESETS[arguments["preset"]]
    (contestant,) = [c for c in plan.contestants if c.title == arguments["title"]]
    _infer(contestant.build().eval(), torch.randn(plan.shape))
    return largest_memory()


if __name__ == "__main__":
    print(json.dumps(_memory_of_one(json.loads(sys.argv[1]))))
