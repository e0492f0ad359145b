"""`softmaxfree bench models`: backbones against their peers, in inference and in training."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ...environment import command_line, largest_memory
from ...imports import import_modules
from ...layers.activations import TanhGELU
from ...layers.attention import SoftmaxFreeAttention
from ...layers.mlp import Mlp
from ...layers.multihead import Layout, ValueConv
from ...layers.patches import EmbeddingConv
from ...layers.registry import register_attention
from ...layers.samplers import Size
from ...models.backbone import check_images
from ...models.cost import cost
from ...ops.kernel import token_scale
from ..measure import in_fresh_process, time_interleaved
from ..paper import LANDMARKS as LENGTHS
from ..paper import LINEARISATION, SAMPLERS
from ..results import comparison, provenance, read, result, table, write
from .contestants import RELEASED, TITLES, layer_names, released


class ReleasedValueConv(ValueConv):
    """With as many channels as heads, and the channels of a head as images of a batch."""

    def forward(self, v: Tensor, size: Size) -> Tensor:
        heads, _, side, _ = self.weight.shape
        images = v.unflatten(-1, (heads, -1)).permute(0, 3, 2, 1).unflatten(-1, size)
        out = F.conv2d(images.flatten(0, 1), self.weight, padding=side // 2, groups=heads)
        return out.unflatten(0, images.shape[:2]).flatten(3).permute(0, 3, 2, 1).flatten(2)


@register_attention(RELEASED)
class ReleasedAttention(SoftmaxFreeAttention):
    """SOFT++ by the released formula, operation by operation."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.value_conv is not None:
            side = self.value_conv.weight.shape[-1]
            self.value_conv = ReleasedValueConv(self.num_heads, side, self.ndim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        landmarks, _ = self.sample(q, layout.size, None)
        scale = token_scale(self.head_dim)
        return released(q, v, self.landmark_norm(landmarks * scale) / scale)


AS_RELEASED: dict[type[nn.Module], type[nn.Module]] = {
    Mlp: timm.layers.Mlp,
    EmbeddingConv: timm.layers.ConvNormAct,
}


def _in_default_order(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].contiguous(),)


@dataclass(frozen=True)
class Contestant:
    """A model by its timm name and arguments, and whom it is compared with.

    sized: Whether it has to be told the side of its images when it is built.
    larger: Its arguments beyond 224 pixels, in place of those that fit only there.
    paper: The paper's row for it.
    as_released: One of our backbones, computed as the authors' code does: their formulas, torch's
        default order of memory, no part of it in tiles.
    """

    title: str
    model: str
    against: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    sized: bool = False
    larger: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)
    as_released: bool = False

    def build(self, side: int) -> nn.Module:
        torch.manual_seed(0)
        arguments = self.arguments | ({"img_size": side} if self.sized else {})
        arguments |= self.larger if side > 224 else {}
        if not self.as_released:
            return timm.create_model(self.model, **arguments)
        arguments = {"attention": RELEASED, "act_layer": "gelu_tanh"} | arguments
        model = timm.create_model(self.model, **arguments)
        model.check = partial(check_images, in_chans=3)
        for stage in model.stages:
            stage.embed.register_forward_pre_hook(_in_default_order)
        for module in model.modules():
            if isinstance(module, Mlp) and type(module.act) is TanhGELU:
                module.act = nn.GELU(approximate="tanh")
            if type(module) in AS_RELEASED:
                module.__class__ = AS_RELEASED[type(module)]
        return model


@dataclass(frozen=True)
class Preset:
    """Groups of models; those of a group run in turns.

    training: At the first of the shapes; inference is measured at all.
    """

    help: str
    groups: dict[str, list[Contestant]]
    shapes: list[tuple[int, int, int, int]]
    repeats: int
    training: bool = False
    seconds: float = 60.0
    """For one contestant at one shape and kind."""
    longest: float = math.inf
    """Seconds of a call: one that could take longer, being quadratic, is not run, and said so."""
    memory: str = ""
    """What of: `inference`, `training`, or nothing."""
    costs: bool = False


_RELEASED = "as released"


def paper_groups() -> dict[str, list[Contestant]]:
    """The paper's first setting: every attention in tiny, with and without the convolution."""
    groups: dict[str, list[Contestant]] = {}
    for model in ("softpp_tiny_fudan", "softpp_tiny"):
        for title, arguments in (("", {}), (", without value convolution", {"value_conv": 0})):
            ours = {"inverse": "auto"}
            groups[model + title] = [
                Contestant(
                    TITLES.get(name, name),
                    model,
                    TITLES["softpp"] if name != "softpp" else "",
                    {
                        "attention": name,
                        **arguments,
                        **(ours if name in ("soft", "softpp") else {}),
                    },
                    sized=True,
                    paper=LINEARISATION.get(name, {}),
                )
                for name in layer_names()
            ]
    tiny = "softpp_tiny_fudan"
    groups[f"{tiny}, number of landmarks"] = [
        Contestant(
            f"{m} tokens", tiny, "", {"num_landmarks": m, "inverse": "auto"}, sized=True, paper=row
        )
        for m, row in LENGTHS.items()
    ]
    groups[f"{tiny}, how they are sampled"] = [
        Contestant(name, tiny, "", {"sampler": name, "inverse": "auto"}, sized=True, paper=row)
        for name, row in SAMPLERS.items()
    ]
    return groups


_SMALL = "softpp_small"
_PEERS = [
    Contestant("SOFT++-S", _SMALL),
    Contestant("SOFT++-S, 49 tokens", _SMALL, arguments={"num_landmarks": 49}),
    *(
        Contestant(title, model, "SOFT++-S, 49 tokens", arguments, sized=sized, larger=larger)
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
                Contestant(
                    _RELEASED,
                    "softpp_tiny_fudan",
                    arguments={"pad": "drop"},
                    as_released=True,
                ),
                Contestant(
                    "softpp_tiny_fudan, auto", "softpp_tiny_fudan", _RELEASED, {"inverse": "auto"}
                ),
                Contestant(
                    "softpp_tiny_fudan, 49 tokens",
                    "softpp_tiny_fudan",
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
}


def run(
    preset: str,
    threads: int,
    out: Path,
    modules: list[str] | None = None,
    device: str = "cpu",
    against: Path | None = None,
) -> dict[str, Any]:
    """Measures a preset; writes its JSON, CSV and Markdown; prints the table."""
    earlier = None if against is None else read(against)  # it may be written over
    import_modules(modules or [])
    plan = PRESETS[preset]
    if preset == "paper":  # attentions of one's own have a row too
        plan = replace(plan, groups=paper_groups())
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    work = [(group, shape) for group in plan.groups for shape in plan.shapes]
    for group, shape in tqdm(work, desc=f"bench models, {preset}", leave=False):
        rows += _measure(plan, group, shape, rows, modules or [], threads, device)
    content = result(command_line(), rows, preset=preset, device=device)
    if preset == "paper":
        content["complexity"] = complexity()
    stem = out / f"models-{preset}"
    write(stem, content, markdown(content))
    print(report(content))
    if earlier is not None:
        same = ["group", "title", "side"]
        print("\n" + comparison(content, earlier, same, ("inference_s", "training_s")))
    print(f"\nwritten: {stem}.json, .csv and .md")
    return content


def _measure(
    plan: Preset,
    group: str,
    shape: tuple[int, int, int, int],
    earlier: list[dict[str, Any]],
    modules: list[str],
    threads: int,
    device: str,
) -> list[dict[str, Any]]:
    """One group at one shape: what a model costs, its time in turns with the others, its memory.

    What cannot be built or run at that size has a note in place of numbers.
    """
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    rows: dict[str, dict[str, Any]] = {}
    models: dict[str, nn.Module] = {}
    for contestant in plan.groups[group]:
        row = {"group": group, **asdict(contestant), "batch": shape[0], "side": shape[2]}
        rows[contestant.title] = row
        expected = max(
            (
                smaller["inference_s"] * (shape[2] / smaller["side"]) ** 4
                for smaller in earlier[-len(plan.groups[group]) :]
                if smaller["title"] == contestant.title and "inference_s" in smaller
            ),
            default=0,
        )
        if expected > plan.longest:
            row["note"] = f"not run: an image could take {expected:.0f} s"
            continue
        try:
            model = contestant.build(shape[2])
            if plan.costs:
                found = cost(model, *shape[1:])
                row |= {"parameters": found.parameters, "multiply_adds": found.multiply_adds}
                row["inverse_multiply_adds"] = found.inverse
            else:
                infer(model.to(device).eval(), images)
        except (ValueError, TypeError, AssertionError, RuntimeError) as error:
            row["note"] = f"cannot run: {str(error).splitlines()[0]}"
            continue
        if plan.memory:
            key = f"{plan.memory}_bytes"
            row[key] = in_fresh_process(
                memory_of_one, contestant, shape, plan.memory, modules, threads, device
            )
            if row[key] is None:
                row["note"] = "out of memory"
                continue
        models[contestant.title] = model.to(device)

    kinds: list[tuple[str, Callable[..., None]]] = [("inference", infer)]
    if plan.training and shape == plan.shapes[0]:
        kinds.append(("training", train))
    for kind, step in kinds:
        calls: dict[str, Callable[[], object]] = {
            title: partial(step, model.train(kind == "training"), images)
            for title, model in models.items()
        }
        for title, timing in time_interleaved(calls, plan.repeats, plan.seconds, device).items():
            rows[title][f"{kind}_s"] = timing.best
            rows[title][f"{kind}_median_s"] = timing.median
    return list(rows.values())


def infer(model: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        model(images)


def train(model: nn.Module, images: Tensor) -> None:
    """A step without the optimiser's part."""
    model.zero_grad()
    labels = torch.arange(images.shape[0], device=images.device)
    nn.functional.cross_entropy(model(images), labels).backward()


def report(content: dict[str, Any], markdown: bool = False) -> str:
    """A table for each group, or one of several sizes."""
    if len({row["side"] for row in content["rows"]}) > 1:
        return _by_side(content["rows"], markdown)
    parts = []
    for group in dict.fromkeys(row["group"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["group"] == group]
        parts += [*([f"{group}:", ""] if group else []), _of_group(rows, markdown), ""]
    if "complexity" in content:
        parts += [COMPLEXITY, "", complexity_table(content["complexity"], markdown)]
    return "\n".join(parts).rstrip()


def _of_group(rows: list[dict[str, Any]], markdown: bool) -> str:
    """Images a second, how many times as many as the peer's, and what was asked for besides."""
    named = {row["title"]: row for row in rows}
    costs = any("parameters" in row for row in rows)
    kinds = [kind for kind in ("inference", "training") if any(f"{kind}_s" in r for r in rows)]
    compared = any(row["against"] for row in rows)
    memory = next((k for k in ("inference_bytes", "training_bytes") if k in rows[0]), None)
    header = ["model", *(["against"] if compared and not costs else [])]
    texts = len(header)
    header += ["M params", "G m-adds"] if costs else []
    for kind in kinds:
        header += [f"{kind[:5] if costs else kind} img/s", *(["ratio"] if compared else [])]
    header += ["peak MB"] if memory else []
    header += ["paper"] if any(row["paper"] for row in rows) else []
    lines = []
    for row in rows:
        line = [row["title"], *([row["against"]] if texts == 2 else [])]
        if "note" in row:
            lines.append([*line, row["note"], *[""] * (len(header) - texts - 1)])
            continue
        if costs:
            own = row["multiply_adds"] - row["inverse_multiply_adds"]
            line += [f"{row['parameters'] / 1e6:.2f}", f"{own / 1e9:.2f}"]
        for kind in kinds:
            line.append(f"{row['batch'] / row[f'{kind}_s']:.3g}")
            if compared:
                peer = named.get(row["against"], {}).get(f"{kind}_s")
                line.append(f"{peer / row[f'{kind}_s']:.2f}" if peer else "")
        line += [f"{row[memory] / 1e6:.0f}"] if memory else []
        if header[-1] == "paper":
            line.append(_as_printed(row["paper"]))
        lines.append(line)
    return table(header, lines, texts, markdown)


def _as_printed(row: dict[str, Any]) -> str:
    """The paper's figures: memory, multiply-adds, images a second in training and inference."""
    parts = [
        f"{row['memory_gb']:g} GB" if "memory_gb" in row else "",
        f"{row['parameters_m']:g} M" if "parameters_m" in row else "",
        f"{row['multiply_adds_g']:g} G" if "multiply_adds_g" in row else "",
        f"{row['training']}/{row['inference']}" if "training" in row else "",
        f"{row['top1']:g} %" if "top1" in row else "",
    ]
    return ", ".join(part for part in parts if part)


def _by_side(rows: list[dict[str, Any]], markdown: bool) -> str:
    """Multiply-adds, milliseconds and megabytes of an image at each side."""
    sides = list(dict.fromkeys(row["side"] for row in rows))
    found = {(row["title"], row["side"]): row for row in rows}
    header = ["model", "M params"]
    for side in sides:
        header += [f"{side}: G", "ms", "MB"]
    header += ["train ms"]
    lines, notes = [], []
    for title in dict.fromkeys(row["title"] for row in rows):
        first = found[title, sides[0]]
        parameters = first.get("parameters")
        line = [title, f"{parameters / 1e6:.1f}" if parameters else "-"]
        for side in sides:
            row = found[title, side]
            if "note" in row:
                line += ["-"] * 3
                notes.append(f"{title} at {side}: {row['note']}")
                continue
            line += [f"{row['multiply_adds'] / 1e9:.1f}", f"{row['inference_s'] * 1e3:.0f}"]
            line.append(f"{row['inference_bytes'] / 1e6:.0f}")
        line.append(f"{first['training_s'] * 1e3:.0f}" if "training_s" in first else "-")
        lines.append(line)
    return "\n".join([table(header, lines, 1, markdown), *(["", *notes] if notes else [])])


NOTES = {
    "paper": """\
Peak memory is that of a process in a training step of batch 2, libraries and weights included.
The paper's column: memory of a batch of 1024 (256 for the Transformer) on V100 GPUs, parameters,
multiply-adds, images a second in training / inference, top-1 accuracy. "ratio" is to SOFT++.
Multiply-adds leave out the inverses of landmark matrices, as the paper does.""",
    "peers": """\
One image, float32, 1 thread; the training step is at the smallest side. Memory is of a process
in inference, libraries and weights included. Where a model has to be built for a size, it is.""",
}


def markdown(content: dict[str, Any]) -> str:
    notes = NOTES.get(
        content["preset"],
        """\
"as released" is the model as the authors' code computes it. Peak memory is of a fresh process,
all included.""",
    )
    return f"""\
# Models: {PRESETS[content["preset"]].help}

{provenance(content)}

{report(content, markdown=True)}

Best of interleaved repeats; a ratio above 1 is faster than the model it is compared with. Only
ratios within one run carry over to other machines. A training step is forward, loss and backward.
{notes}
"""


def memory_of_one(
    contestant: Contestant,
    shape: tuple[int, ...],
    kind: str,
    modules: list[str],
    threads: int,
    device: str,
) -> int:
    """In a process of its own: the most that it ever takes, libraries and weights included."""
    torch.set_num_threads(threads)
    import_modules(modules)
    model = contestant.build(shape[2]).to(device)
    step = train if kind == "training" else infer
    step(model.train(kind == "training"), torch.randn(*shape, device=device))
    return torch.cuda.max_memory_allocated() if device == "cuda" else largest_memory()
