"""`softmaxfree bench models`: backbones against their peers, in inference and in training."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ...layers.registry import ATTENTIONS
from ...models.cost import Cost, cost
from ...models.replace import replace_attention
from ..measure import noise
from ..paper import LANDMARKS, LINEARISATION, SAMPLERS
from ..results import THREE, Column, Note, Page, Row, Table, columns
from .complexity import NOTES as COMPLEXITY
from .complexity import complexity, complexity_table
from .contestants import TITLES
from .released import as_released
from .runner import GROWING, Benchmark, Entry, too_slow

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class ComparedModel:
    """A model by its timm name and arguments.

    against: Title of the model that it is compared with.
    sized: Whether it is built for one side of images.
    larger: Arguments that replace its own beyond 224 pixels.
    paper: The paper's row for it.
    as_released: Whether it is one of our backbones, computed as the authors' code does.
    replaced: Attention in place of the model's own.
    """

    title: str
    model: str
    against: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    sized: bool = False
    larger: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)
    as_released: bool = False
    replaced: str = ""

    def build(self, side: int) -> nn.Module:
        torch.manual_seed(0)
        arguments = self.arguments | ({"img_size": side} if self.sized else {})
        arguments |= self.larger if side > 224 else {}
        if self.as_released:
            return as_released(self.model, arguments)
        model = timm.create_model(self.model, **arguments)
        if self.replaced:
            replace_attention(model, self.replaced, measure=False)
        return model


@dataclass(frozen=True)
class Preset:
    """Groups of models; those of a group take turns.

    training: Whether training is measured too, at the first of the shapes.
    seconds: For one model at one shape and kind.
    longest: Seconds of a call; a model that would take longer, if quadratic, is not run.
    memory: Kind whose memory is measured, `inference` or `training`.
    """

    help: str
    note: str
    groups: dict[str, list[ComparedModel]]
    shapes: list[Shape]
    repeats: int
    memory: str
    training: bool = True
    seconds: float = 60.0
    longest: float = math.inf


_TINY, _AUTO = "softpp_tiny_fudan", {"inverse": "auto"}


def paper_groups() -> dict[str, list[ComparedModel]]:
    """The paper's first setting: every attention in tiny, with and without the convolution."""
    groups: dict[str, list[ComparedModel]] = {}
    for model in (_TINY, "softpp_tiny"):
        for title, arguments in (("", {}), (", without value convolution", {"value_conv": 0})):
            groups[model + title] = [
                ComparedModel(
                    TITLES.get(name, name),
                    model,
                    TITLES["softpp"] if name != "softpp" else "",
                    {"attention": name} | arguments | (_AUTO if name in ("soft", "softpp") else {}),
                    sized=True,
                    paper=LINEARISATION.get(name, {}),
                )
                for name in ATTENTIONS
            ]
    ablated = partial(ComparedModel, model=_TINY, sized=True)
    groups[f"{_TINY}, number of landmarks"] = [
        ablated(f"{m} landmarks", arguments={"num_landmarks": m} | _AUTO, paper=row)
        for m, row in LANDMARKS.items()
    ]
    groups[f"{_TINY}, how they are sampled"] = [
        ablated(name, arguments={"sampler": name} | _AUTO, paper=row)
        for name, row in SAMPLERS.items()
    ]
    return groups


_RELEASED, _SMALL = "as released", "softpp_small"
_peer = partial(ComparedModel, against="SOFT++-S")
_PEERS = [
    ComparedModel("SOFT++-S", _SMALL),
    ComparedModel("SOFT++-S, ratios", _SMALL, arguments=GROWING),
    _peer("PVTv2-B2", "pvt_v2_b2"),
    _peer("Swin-T", "swin_tiny_patch4_window7_224", sized=True),
    _peer(
        "SwinV2-T",
        "swinv2_tiny_window8_256",
        arguments={"window_size": 7},
        sized=True,
        larger={"window_size": 8},
    ),
    _peer("ConvNeXt-T", "convnext_tiny"),
    _peer("ViT-S/16", "vit_small_patch16_224", sized=True),
    _peer("DeiT III-S", "deit3_small_patch16_224", sized=True),
    _peer("Twins-PCPVT-S", "twins_pcpvt_small", sized=True),
    _peer("CoAtNet-0", "coatnet_0_rw_224", sized=True),
    _peer("CaiT-XS24", "cait_xs24_384", sized=True),
    _peer("ConViT-S", "convit_small", sized=True),
    _peer("CoaT-Lite-S", "coat_lite_small", sized=True),
    _peer("RegNetY-4G", "regnety_040"),
    _peer("ResNet-50", "resnet50"),
]
_LARGE = [
    ComparedModel(_RELEASED, _TINY, arguments={"pad": "drop"}, as_released=True),
    ComparedModel(f"{_TINY}, auto", _TINY, _RELEASED, _AUTO),
    ComparedModel(f"{_TINY}, 49 landmarks", _TINY, _RELEASED, _AUTO | {"num_landmarks": 49}),
]

_REPLACED = [
    model
    for title, name in (
        ("SwinV2-T, windows of 16", "swinv2_tiny_window16_256"),
        ("SwinV2-T, windows of 8", "swinv2_tiny_window8_256"),
        ("ViT-S/16", "vit_small_patch16_224"),
    )
    for model in (
        ComparedModel(title, name, sized=True),
        ComparedModel(f"{title}, with SOFT++", name, title, sized=True, replaced="softpp"),
    )
]

PRESETS = {
    "large": Preset(
        "one image of 800 x 1333 pixels, as in detection",
        """\
"as released" is the model as the authors' code computes it. Peak memory is of a fresh process,
libraries and weights included.""",
        {"": _LARGE},
        [(1, 3, 800, 1333)],
        repeats=3,
        memory="inference",
        training=False,
    ),
    "paper": Preset(
        "every attention in tiny at 224 x 224, batch 2, beside the paper's rows",
        """\
Peak memory is that of a process in a training step of batch 2, libraries and weights included.
The paper's column: memory of a batch of 1024 (256 for the Transformer) on V100 GPUs, parameters,
multiply-adds, images a second in training / inference, top-1 accuracy. "ratio" is to SOFT++.""",
        paper_groups(),
        [(2, 3, 224, 224)],
        repeats=3,
        memory="training",
    ),
    "peers": Preset(
        "what a user would pick instead, at about 4.5 G multiply-adds",
        """\
One image, float32, 1 thread; the training step is at the smallest side. Memory is of a process
in inference, libraries and weights included. Where a model has to be built for a size, it is.""",
        {"": _PEERS},
        [(1, 3, 224, 224), (1, 3, 512, 512), (1, 3, 1024, 1024)],
        repeats=5,
        memory="inference",
        seconds=8.0,
        longest=30.0,
    ),
    "replaced": Preset(
        "timm's own attention, and SOFT++ in its place, at 256 x 256",
        """\
One image, float32. By `softmaxfree.replace_attention`, with 49 landmarks, over the whole map; timm
computes ViT's attention by a fused kernel and Swin V2's, of cosines, by single steps. Peak memory
is that of a process in a training step, libraries and weights included.""",
        {"": _REPLACED},
        [(1, 3, 256, 256)],
        repeats=5,
        memory="training",
        seconds=10.0,
    ),
}


def bench_models(
    preset: Literal["large", "paper", "peers", "replaced"] = "peers", **options: Any
) -> Row:
    """Measure whole backbones against their peers, in inference and in a training step.

    Contestants take turns in one process. Only ratios within one run carry over to other machines.
    Prints a table and writes it as JSON, CSV and Markdown.

    Args:
        preset: large: one image of 800 x 1333 pixels, time and memory, against the released
            formula (8 minutes); paper: every attention in tiny, with and without the value
            convolution, and the paper's ablations (10 minutes); peers: models of timm of the same
            cost at 224, 512 and 1024 pixels (10 minutes); replaced: models of timm with SOFT++ in
            place of their attention (2 minutes).
        options: Those of `Benchmark`.
    """
    bench, plan = Benchmark(**options), PRESETS[preset]
    if preset == "paper":  # a user's attentions have a row too
        plan = replace(plan, groups=paper_groups())
    rows: list[Row] = []
    work = [(group, shape) for group in plan.groups for shape in plan.shapes]
    for group, shape in tqdm(work, desc=f"bench models, {preset}", leave=False):
        rows += _measured(bench, plan, group, shape, rows)
    more: Row = {"complexity": complexity()} if preset == "paper" else {}
    return bench.publish(
        f"models-{preset}", rows, page, same=["group", "title", "side"],
        preset=preset, device=bench.device, **more,
    )  # fmt: skip


def _measured(
    bench: Benchmark, plan: Preset, group: str, shape: Shape, before: list[Row]
) -> list[Row]:
    """The rows of one group at one shape."""
    size = {"batch": shape[0], "side": shape[2]}
    models = plan.groups[group]
    rows: list[Row] = [{"group": group, **asdict(model), **size} for model in models]
    training = plan.training and shape == plan.shapes[0]
    for kind in ("inference", "training") if training else ("inference",):
        entries = [
            Entry(
                row,
                partial(prepare_model, model, shape, kind, bench.device),
                cost_of_pass if kind == "inference" else None,
                row.get("note") or too_slow(before, row, "title", "side", kind, plan.longest, 4),
            )
            for row, model in zip(rows, models)
        ]
        memory = "process" if plan.memory == kind else ""
        bench.measure(entries, kind, plan.repeats, plan.seconds, memory)
    return rows


def prepare_model(model: ComparedModel, shape: Shape, kind: str, device: str) -> partial[None]:
    """A pass through a model: `inference`, or a step of `training`."""
    images = noise(*shape).to(device)
    built = model.build(shape[2]).to(device).train(kind == "training")
    return partial(train if kind == "training" else infer, built, images)


def cost_of_pass(call: partial[None]) -> Cost:
    model, images = call.args
    return cost(model, *images.shape[1:])


def infer(model: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        model(images)


def train(model: nn.Module, images: Tensor) -> None:
    """A training step without the optimiser's part."""
    model.zero_grad()
    labels = torch.arange(images.shape[0], device=images.device)
    nn.functional.cross_entropy(model(images), labels).backward()


def page(content: Row) -> Page:
    preset = PRESETS[content["preset"]]
    parts = [*_tables(content["rows"])]
    if "complexity" in content:
        parts += [COMPLEXITY, complexity_table(content["complexity"])]
    note = f"""\
Best of interleaved repeats; a ratio above 1 is faster than the model it is compared with. Only
ratios within one run carry over to other machines. A training step is forward, loss and backward.
Multiply-adds leave out the inverses of landmark matrices, as the paper does.
{preset.note}"""
    return Page(f"Models: {preset.help}", [*parts, Note(note)])


def _tables(rows: list[Row]) -> Iterator[str | Table]:
    """A table for each group and size: images a second, ratios to the peer's, and costs."""

    def images(kind: str, row: Row) -> float:
        return row["batch"] / row[f"{kind}_s"]

    def ratio(kind: str, row: Row) -> float:
        return images(kind, row) / images(kind, named[row["against"]])

    for group, side in dict.fromkeys((row["group"], row["side"]) for row in rows):
        own = [row for row in rows if (row["group"], row["side"]) == (group, side)]
        named = {row["title"]: row for row in own}
        yield f"{group or f'{side} pixels'}:"
        yield columns(
            own,
            Column("model", "title"),
            Column("M params", "parameters", 2, 1e6),
            Column("G m-adds", lambda x: x["multiply_adds"] - x["inverse_multiply_adds"], 2, 1e9),
            Column("infer img/s", partial(images, "inference"), THREE),
            Column("ratio", partial(ratio, "inference"), 2),
            Column("train img/s", partial(images, "training"), THREE),
            Column("ratio", partial(ratio, "training"), 2),
            Column("peak MB", lambda x: x.get("inference_bytes", x.get("training_bytes")), 0, 1e6),
            Column("paper", lambda row: _as_printed(row["paper"])),
        )


def _as_printed(row: Row) -> str:
    """The paper's figures: memory, multiply-adds, images a second in training and inference."""
    units = {"memory_gb": "GB", "parameters_m": "M", "multiply_adds_g": "G"}
    parts = [f"{row[name]:g} {unit}" for name, unit in units.items() if name in row]
    parts += [f"{row['training']}/{row['inference']}"] if "training" in row else []
    return ", ".join([*parts, f"{row['top1']:g} %"]) if row else ""
