"""`softmaxfree bench models`: backbones against their peers, in inference and in training."""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ...environment import command_line
from ...imports import Names
from ...models.cost import Cost, cost
from ...models.replace import replace_attention
from ..paper import LANDMARKS, LINEARISATION, SAMPLERS
from ..results import Note, Page, Table, number, publish, result
from .complexity import NOTES as COMPLEXITY
from .complexity import complexity, complexity_table
from .contestants import TITLES, Device, layer_names
from .image import GROWING
from .released import as_released
from .runner import Entry, Plan, Row, measure_in_turns, start, too_slow

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
    memory: Kind whose memory is measured, `inference` or `training`; none if empty.
    """

    help: str
    groups: dict[str, list[ComparedModel]]
    shapes: list[Shape]
    repeats: int
    training: bool = False
    seconds: float = 60.0
    longest: float = math.inf
    memory: str = ""
    costs: bool = False


def paper_groups() -> dict[str, list[ComparedModel]]:
    """The paper's first setting: every attention in tiny, with and without the convolution."""
    groups: dict[str, list[ComparedModel]] = {}
    tiny, auto = "softpp_tiny_fudan", {"inverse": "auto"}
    for model in (tiny, "softpp_tiny"):
        for title, arguments in (("", {}), (", without value convolution", {"value_conv": 0})):
            groups[model + title] = [
                ComparedModel(
                    TITLES.get(name, name),
                    model,
                    TITLES["softpp"] if name != "softpp" else "",
                    {"attention": name} | arguments | (auto if name in ("soft", "softpp") else {}),
                    sized=True,
                    paper=LINEARISATION.get(name, {}),
                )
                for name in layer_names()
            ]
    groups[f"{tiny}, number of landmarks"] = [
        ComparedModel(
            f"{m} landmarks", tiny, "", {"num_landmarks": m} | auto, sized=True, paper=row
        )
        for m, row in LANDMARKS.items()
    ]
    groups[f"{tiny}, how they are sampled"] = [
        ComparedModel(name, tiny, "", {"sampler": name} | auto, sized=True, paper=row)
        for name, row in SAMPLERS.items()
    ]
    return groups


_RELEASED = "as released"
_TINY = "softpp_tiny_fudan"
_SMALL = "softpp_small"
_PEERS = [
    ComparedModel("SOFT++-S", _SMALL),
    ComparedModel("SOFT++-S, ratios", _SMALL, arguments=GROWING),
    *(
        ComparedModel(title, model, "SOFT++-S", arguments, sized=sized, larger=larger)
        for title, model, arguments, sized, larger in (
            ("PVTv2-B2", "pvt_v2_b2", {}, False, {}),
            ("Swin-T", "swin_tiny_patch4_window7_224", {}, True, {}),
            ("SwinV2-T", "swinv2_tiny_window8_256", {"window_size": 7}, True, {"window_size": 8}),
            ("ConvNeXt-T", "convnext_tiny", {}, False, {}),
            ("ViT-S/16", "vit_small_patch16_224", {}, True, {}),
            ("DeiT III-S", "deit3_small_patch16_224", {}, True, {}),
            ("Twins-PCPVT-S", "twins_pcpvt_small", {}, True, {}),
            ("CoAtNet-0", "coatnet_0_rw_224", {}, True, {}),
            ("CaiT-XS24", "cait_xs24_384", {}, True, {}),
            ("ConViT-S", "convit_small", {}, True, {}),
            ("CoaT-Lite-S", "coat_lite_small", {}, True, {}),
            ("RegNetY-4G", "regnety_040", {}, False, {}),
            ("ResNet-50", "resnet50", {}, False, {}),
        )
    ),
]

PRESETS = {
    "large": Preset(
        "one image of 800 x 1333 pixels, as in detection",
        {
            "": [
                ComparedModel(_RELEASED, _TINY, arguments={"pad": "drop"}, as_released=True),
                ComparedModel(f"{_TINY}, auto", _TINY, _RELEASED, {"inverse": "auto"}),
                ComparedModel(
                    f"{_TINY}, 49 landmarks",
                    _TINY,
                    _RELEASED,
                    {"inverse": "auto", "num_landmarks": 49},
                ),
            ]
        },
        [(1, 3, 800, 1333)],
        repeats=3,
        memory="inference",
    ),
    "paper": Preset(
        "every attention in tiny at 224 x 224, batch 2, beside the paper's rows",
        paper_groups(),
        [(2, 3, 224, 224)],
        repeats=3,
        training=True,
        memory="training",
        costs=True,
    ),
    "peers": Preset(
        "what a user would pick instead, at about 4.5 G multiply-adds",
        {"": _PEERS},
        [(1, 3, 224, 224), (1, 3, 512, 512), (1, 3, 1024, 1024)],
        repeats=5,
        seconds=8.0,
        longest=30.0,
        training=True,
        memory="inference",
        costs=True,
    ),
    "replaced": Preset(
        "timm's own attention, and SOFT++ in its place, at 256 x 256",
        {
            "": [
                model
                for title, name in (
                    ("SwinV2-T, windows of 16", "swinv2_tiny_window16_256"),
                    ("SwinV2-T, windows of 8", "swinv2_tiny_window8_256"),
                    ("ViT-S/16", "vit_small_patch16_224"),
                )
                for model in (
                    ComparedModel(title, name, sized=True),
                    ComparedModel(
                        f"{title}, with SOFT++", name, title, sized=True, replaced="softpp"
                    ),
                )
            ]
        },
        [(1, 3, 256, 256)],
        repeats=5,
        seconds=10.0,
        training=True,
        memory="training",
        costs=True,
    ),
}


def bench_models(
    preset: Literal["large", "paper", "peers", "replaced"] = "peers",
    threads: int = 1,
    out: Path = Path("results"),
    modules: Names = None,
    device: Device = "cpu",
    against: Path | None = None,
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
        threads: Threads to compute with; ratios are most reliable with 1.
        out: Folder for the results.
        modules: Python modules to import first, which register attentions of your own.
        device: Device to compute on.
        against: A .json file of an earlier run to compare with.
    """
    earlier = start(threads, device, modules, against)
    plan = PRESETS[preset]
    if preset == "paper":  # a user's attentions have a row too
        plan = replace(plan, groups=paper_groups())
    rows: list[Row] = []
    work = [(group, shape) for group in plan.groups for shape in plan.shapes]
    for group, shape in tqdm(work, desc=f"bench models, {preset}", leave=False):
        rows += _measure(plan, group, shape, rows, modules, device)
    content = result(command_line(), rows, preset=preset, device=device)
    if preset == "paper":
        content["complexity"] = complexity()
    same = ["group", "title", "side"]
    return publish(out / f"models-{preset}", content, page, earlier=earlier, same=same)


def _measure(
    plan: Preset, group: str, shape: Shape, before: list[Row], modules: Names, device: str
) -> list[Row]:
    """The rows of one group at one shape."""
    size = {"batch": shape[0], "side": shape[2]}
    models = plan.groups[group]
    rows = [{"group": group, **asdict(model), **size} for model in models]
    training = plan.training and shape == plan.shapes[0]
    for kind in ("inference", "training") if training else ("inference",):
        entries = [
            Entry(
                row,
                partial(prepare_model, model, shape, kind, device),
                cost_of_pass if plan.costs and kind == "inference" else None,
                row.get("note") or too_slow(before, row, "title", "side", kind, plan.longest, 4),
            )
            for row, model in zip(rows, models)
        ]
        memory = "process" if plan.memory == kind else ""
        how = Plan(plan.repeats, plan.seconds, memory, device, modules)
        measure_in_turns(entries, kind, how)
    return rows


def prepare_model(model: ComparedModel, shape: Shape, kind: str, device: str) -> partial[None]:
    """A pass through a model: `inference`, or a step of `training`."""
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
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
    rows, preset = content["rows"], content["preset"]
    parts: list[str | Table] = []
    if len({row["side"] for row in rows}) > 1:
        parts += _by_side(rows)
    else:
        for group in dict.fromkeys(row["group"] for row in rows):
            parts += [f"{group}:"] if group else []
            parts.append(_of_group([row for row in rows if row["group"] == group]))
    if "complexity" in content:
        parts += [COMPLEXITY, complexity_table(content["complexity"])]
    note = f"""\
Best of interleaved repeats; a ratio above 1 is faster than the model it is compared with. Only
ratios within one run carry over to other machines. A training step is forward, loss and backward.
{NOTES[preset]}"""
    return Page(f"Models: {PRESETS[preset].help}", [*parts, Note(note)])


def _of_group(rows: list[Row]) -> Table:
    """Images a second, ratios to the peer's, and what else was measured."""
    named = {row["title"]: row for row in rows}
    costs = any("parameters" in row for row in rows)
    kinds = [kind for kind in ("inference", "training") if any(f"{kind}_s" in r for r in rows)]
    compared = any(row["against"] for row in rows)
    memory = next((k for k in ("inference_bytes", "training_bytes") if k in rows[0]), None)
    printed = any(row["paper"] for row in rows)
    header = ["model", *(["against"] if compared and not costs else [])]
    texts = len(header)
    header += ["M params", "G m-adds"] if costs else []
    for kind in kinds:
        header += [f"{kind[:5] if costs else kind} img/s", *(["ratio"] if compared else [])]
    header += [*(["peak MB"] if memory else []), *(["paper"] if printed else [])]
    lines = []
    for row in rows:
        line = [row["title"], *([row["against"]] if texts == 2 else [])]
        if "note" in row:
            lines.append([*line, row["note"], *[""] * (len(header) - texts - 1)])
            continue
        if costs:
            own = row["multiply_adds"] - row["inverse_multiply_adds"]
            line += [number(row["parameters"], 2, 1e6), number(own, 2, 1e9)]
        for kind in kinds:
            line.append(f"{row['batch'] / row[f'{kind}_s']:.3g}")
            peer = named.get(row["against"], {}).get(f"{kind}_s")
            line += [f"{peer / row[f'{kind}_s']:.2f}" if peer else ""] if compared else []
        line += [number(row[memory], 0, 1e6)] if memory else []
        line += [_as_printed(row["paper"])] if printed else []
        lines.append(line)
    return Table(header, lines, texts)


def _as_printed(row: Row) -> str:
    """The paper's figures: memory, multiply-adds, images a second in training and inference."""
    parts = [
        f"{row['memory_gb']:g} GB" if "memory_gb" in row else "",
        f"{row['parameters_m']:g} M" if "parameters_m" in row else "",
        f"{row['multiply_adds_g']:g} G" if "multiply_adds_g" in row else "",
        f"{row['training']}/{row['inference']}" if "training" in row else "",
        f"{row['top1']:g} %" if "top1" in row else "",
    ]
    return ", ".join(part for part in parts if part)


def _by_side(rows: list[Row]) -> list[str | Table]:
    """Multiply-adds, milliseconds and megabytes of an image at each side."""
    sides = list(dict.fromkeys(row["side"] for row in rows))
    found = {(row["title"], row["side"]): row for row in rows}
    header = ["model", "M params"]
    header += [title for side in sides for title in (f"{side}: G", "ms", "MB")]
    lines = []
    for title in dict.fromkeys(row["title"] for row in rows):
        first = found[title, sides[0]]
        line = [title, number(first.get("parameters"), 1, 1e6, "-")]
        for side in sides:
            row = {} if "note" in found[title, side] else found[title, side]
            line.append(number(row.get("multiply_adds"), 1, 1e9, "-"))
            line.append(number(row.get("inference_s"), 0, 1e-3, "-"))
            line.append(number(row.get("inference_bytes"), 0, 1e6, "-"))
        lines.append([*line, number(first.get("training_s"), 0, 1e-3, "-")])
    why = [f"{row['title']} at {row['side']}: {row['note']}" for row in rows if "note" in row]
    return [Table([*header, "train ms"], lines), *(["\n".join(why)] if why else [])]


NOTES = {
    "large": """\
"as released" is the model as the authors' code computes it. Peak memory is of a fresh process,
libraries and weights included.""",
    "paper": """\
Peak memory is that of a process in a training step of batch 2, libraries and weights included.
The paper's column: memory of a batch of 1024 (256 for the Transformer) on V100 GPUs, parameters,
multiply-adds, images a second in training / inference, top-1 accuracy. "ratio" is to SOFT++.
Multiply-adds leave out the inverses of landmark matrices, as the paper does.""",
    "peers": """\
One image, float32, 1 thread; the training step is at the smallest side. Memory is of a process
in inference, libraries and weights included. Where a model has to be built for a size, it is.""",
    "replaced": """\
One image, float32. By `softmaxfree.replace_attention`, with 49 landmarks, over the whole map; timm
computes ViT's attention by a fused kernel and Swin V2's, of cosines, by single steps. Peak memory
is that of a process in a training step, libraries and weights included.""",
}
