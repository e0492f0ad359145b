"""`softmaxfree bench speed`: what this package promises about speed, measured and judged."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from ...environment import command_line
from ...layers.multihead import Layout
from ...layers.registry import build_attention
from ...models.cost import cost, image_bytes
from ...ops.backends import native, torch_only
from ..measure import noise, time_interleaved
from ..results import Column, Note, Page, Row, columns, publish, result
from . import busy
from .contestants import OPERATIONS, Case, Ready
from .models import ComparedModel, infer, train
from .runner import Call

CORE = [Case(1, 2, 3136), Case(8, 2, 3136), Case(1, 12, 6272), Case(8, 10, 196)]
PRODUCT = 1024
"""Side of the matrices of a large product, which runs at the machine's best rate."""

SMALL, SOFTX, SWIN, CONVNEXT = "softpp_small", "softx_small", "Swin-T", "ConvNeXt-T"
TINY, PVT, DEIT = "softpp_tiny_fudan", "PVTv2-B1", "DeiT-S"
RELEASED, FEW = "softpp_small as released", "softpp_small, 49 landmarks"

MODELS = [
    ComparedModel(SMALL, "softpp_small"),
    ComparedModel(SOFTX, "softx_small"),
    ComparedModel(RELEASED, "softpp_small", as_released=True),
    ComparedModel(SWIN, "swin_tiny_patch4_window7_224"),
    ComparedModel(CONVNEXT, "convnext_tiny"),
    ComparedModel(DEIT, "deit_small_patch16_224"),
    ComparedModel(TINY, "softpp_tiny_fudan", arguments={"inverse": "auto"}),
    ComparedModel(PVT, "pvt_v2_b1"),
]
"""At 224 x 224, batch 4."""

LARGE = [
    ComparedModel(FEW, "softpp_small", arguments={"num_landmarks": 49}),
    ComparedModel(SOFTX, "softx_small"),
    ComparedModel(SWIN, "swin_tiny_patch4_window7_224", sized=True),
    ComparedModel("PVTv2-B2", "pvt_v2_b2"),
]
SIDES = (512, 1024)
IMAGES = (4, 3, 224, 224)
PARTS = {"embed": "embedding", "attention": "attention", "mlp": "feed-forward"}
STEPS: dict[str, Callable[[nn.Module, Tensor], None]] = {"inference": infer, "training": train}


@dataclass(frozen=True)
class Promise:
    """A ratio that has to be at least, or at most, its target; better still, its stretch goal."""

    what: str
    measured: float
    target: float
    least: bool = True
    stretch: float | None = None

    @property
    def verdict(self) -> str:
        def kept(limit: float) -> bool:
            return self.measured >= limit if self.least else self.measured <= limit

        if not kept(self.target):
            return "missed"
        return "stretch" if self.stretch is not None and kept(self.stretch) else "met"


def bench_speed(out: Path = Path("results")) -> Row:
    """Measure what is promised about speed, and say whether it is kept (6 minutes).

    The attention against its matrix products, backbones against Swin-T, ConvNeXt-T and PVTv2,
    one thread and two, memory of training, large images, the time to import. Prints a table with
    targets and verdicts and writes it as JSON, CSV and Markdown.

    Args:
        out: Folder for the results.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    promises: list[Promise] = []
    numbers: dict[str, float] = {}
    parts = (_core, _softx, _models, _threads, _memory, _large, _waiting, _start)
    try:
        for part in tqdm(parts, desc="bench speed", unit="part", leave=False):
            promises += part(numbers)
        breakdown = stages()
    finally:
        torch.set_num_threads(before)
    rows = [{**asdict(promise), "verdict": promise.verdict} for promise in promises]
    content = result(command_line(), rows, numbers=numbers)
    return publish(out / "speed", content | {"threads": 1, "stages": breakdown}, page)


def _both_ways(title: str, call: Call) -> dict[str, Call]:
    """A contestant, and the same without the compiled code, if that is built."""

    def by_torch() -> None:
        with torch_only():
            call()

    return {title: call, **({f"{title}, torch only": by_torch} if native.library() else {})}


def _timed(
    numbers: dict[str, float], kind: str, calls: dict[str, Call], **options: Any
) -> tuple[dict[str, float], float]:
    """Best seconds in turns, and the operations per second of a large product beside them."""
    a, b = torch.randn(2, PRODUCT, PRODUCT)
    timings = time_interleaved({"": lambda: a @ b, **calls}, **options)
    best = {title: timing.best for title, timing in timings.items()}
    rate = 2 * PRODUCT**3 / best.pop("")
    numbers |= {f"{title}, {kind}": seconds for title, seconds in best.items()}
    return best, rate


def _core(numbers: dict[str, float]) -> Iterator[Promise]:
    """Each case against its matrix products at the rate of a large one."""
    for case in CORE:
        ready = OPERATIONS["op_softpp"].ready(case)
        title = f"core {case.batch}, {case.heads}, {case.n}"
        long = case.n >= 3136
        for kind, call, passes, suffix, target, stretch in (
            ("forward", ready.forward, 1, "", *((1.9, 1.4) if long else (3.5, 2.2))),
            (
                "forward and backward", ready.training, 3, ", f+b",
                *((2.2, 1.6) if long else (3.2, None)),
            ),
        ):  # fmt: skip
            found, rate = _timed(numbers, kind, _both_ways(title, call), repeats=15, seconds=5)
            for name, seconds in found.items():
                ratio = seconds * rate / (passes * case.products())
                yield Promise(f"{name}{suffix}: x products", ratio, target, False, stretch)


UNTIED = "SOFT++, untied"
LAYERS: dict[str, tuple[str, dict[str, Any], float]] = {
    UNTIED: ("softpp", {"tie_qk": False}, 1.0),
    "softx": ("softx", {}, 0.8),
    "softx, inverse": ("softx", {"middle": "inverse"}, 1.15),
}
"""Attentions with projections of queries and of keys: names, options, and targets as multiples of
the first."""


def _softx(numbers: dict[str, float]) -> Iterator[Promise]:
    """Attention between its projections, with landmarks."""
    for case in CORE:
        q, k, v = (
            x.requires_grad_() for x in case.tensors(3, case.batch, case.heads, case.n, case.d)
        )
        layout = Layout((case.n,), (case.n,), None, None)
        ready = {}
        for title, (name, options, _) in LAYERS.items():
            layer = build_attention(name, case.dim, case.heads, ndim=1, **options)
            ready[title] = Ready(partial(layer.attend, q, k, v, layout), [q, k, v])
        for kind in ("forward", "training"):
            calls = {title: getattr(one, kind) for title, one in ready.items()}
            best, _ = _timed(
                numbers, f"{case.batch}, {case.heads}, {case.n}, {kind}", calls, repeats=9
            )
            for title, (*_, target) in list(LAYERS.items())[1:]:
                what = f"{title} {case.batch}, {case.heads}, {case.n}, {kind}: x {UNTIED}"
                yield Promise(what, best[title] / best[UNTIED], target, False)


def _models(numbers: dict[str, float]) -> Iterator[Promise]:
    images = noise(*IMAGES)
    models = {model.title: model.build(224) for model in MODELS}
    for kind, step in STEPS.items():
        calls: dict[str, Call] = {
            title: partial(step, model.train(kind == "training"), images)
            for title, model in models.items()
        }
        ours = _both_ways(SMALL, calls[SMALL]) | _both_ways(SOFTX, calls[SOFTX])
        best, rate = _timed(numbers, kind, calls | ours, repeats=7, seconds=20)
        for name in ours:
            ratio, stretch = best[SWIN] / best[name], best[SWIN] / best[CONVNEXT]
            target = 0.95 if name == f"{SOFTX}, torch only" else 1.0
            yield Promise(f"{name}, {kind}: x {SWIN}", ratio, target, True, stretch)
        target = 1.6 if kind == "inference" else 2.3
        yield Promise(f"{SMALL}, {kind}: x as released", best[RELEASED] / best[SMALL], target)
        yield Promise(f"{TINY}, {kind}: x {PVT}", best[PVT] / best[TINY], 1.4)
        if kind == "inference":
            for title in (SMALL, DEIT, CONVNEXT, SWIN, PVT):
                operations = 2 * len(images) * cost(models[title], *IMAGES[1:]).multiply_adds
                numbers[f"{title}, x multiply-adds"] = best[title] * rate / operations
            bare = numbers[f"{SMALL}, x multiply-adds"]
            yield Promise(f"{SMALL}: x multiply-adds at the products' rate", bare, 1.4, False)


def _threads(numbers: dict[str, float]) -> Iterator[Promise]:
    model, images = MODELS[0].build(224), noise(*IMAGES)

    def with_threads(count: int, step: Callable[[nn.Module, Tensor], None]) -> None:
        torch.set_num_threads(count)
        try:
            step(model, images)
        finally:
            torch.set_num_threads(1)

    for kind, step in STEPS.items():
        model.train(kind == "training")
        calls: dict[str, Call] = {
            f"{SMALL}, {count} threads": partial(with_threads, count, step) for count in (1, 2)
        }
        best, _ = _timed(numbers, kind, calls, repeats=7, seconds=15)
        one, two = best.values()
        yield Promise(f"{SMALL}, {kind}: two threads x one", one / two, 1.8)


def _memory(numbers: dict[str, float]) -> Iterator[Promise]:
    ours, swin = (
        image_bytes(model.build(224), *IMAGES[1:])
        for title in (SMALL, SWIN)
        for model in MODELS
        if model.title == title
    )
    yield Promise(f"{SMALL}, memory of training an image: x {SWIN}", ours / swin, 1, False)


def _large(numbers: dict[str, float]) -> Iterator[Promise]:
    for side in SIDES:
        images = noise(1, 3, side, side)
        calls: dict[str, Call] = {
            model.title: partial(infer, model.build(side).eval(), images) for model in LARGE
        }
        best, _ = _timed(numbers, f"{side} pixels", calls, repeats=5, seconds=20)
        for title, target in ((SWIN, 1.0), ("PVTv2-B2", 1.2)):
            ratio = best[title] / best[FEW]
            yield Promise(f"{FEW}, {side} pixels: x {title}", ratio, target)
        ratio = best[SWIN] / best[SOFTX]
        yield Promise(f"{SOFTX}, {side} pixels: x {SWIN}", ratio, 1.2 if side == 1024 else 1.0)


def _waiting(numbers: dict[str, float]) -> Iterator[Promise]:
    """What waiting threads cost: beside another program, and on an idle machine."""
    found = busy.measure()
    numbers |= {f"softpp_nano, training step {name}": value for name, value in found.items()}
    ratio = found["beside"] / found["alone"]
    yield Promise("softpp_nano, training beside another: x alone", ratio, 2.5, False)
    cost = found["alone"] / found["alone, GNU's default"]
    yield Promise("softpp_nano, training: x GNU's waiting", cost, 1.03, False)


_IMPORT = """
import timm, time
before = time.perf_counter()
import softmaxfree
print(time.perf_counter() - before)
"""


def _start(numbers: dict[str, float]) -> Iterator[Promise]:
    call = [sys.executable, "-c", _IMPORT]
    seconds = [float(subprocess.check_output(call, text=True)) for _ in range(3)]
    numbers["import"] = min(seconds)
    yield Promise("import softmaxfree, seconds beyond import timm", min(seconds), 0.3, False)


def stages() -> list[Row]:
    """Where the time of `softpp_small` in inference goes: by stage and part, per image.

    Seconds are the least of several passes, multiply-adds as counted by torch.
    """
    model, images = MODELS[0].build(224).eval(), noise(*IMAGES)
    spent: dict[str, float] = {}

    def watch(name: str, module: nn.Module) -> None:
        def start(*_: Any) -> None:
            spent[name] = -perf_counter()

        def stop(*_: Any) -> None:
            spent[name] += perf_counter()

        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop)

    parts: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        words = name.split(".")
        if words[0] == "stages" and words[-1] in PARTS:
            parts.setdefault((words[1], PARTS[words[-1]]), []).append(name)
            watch(name, module)
    watch("", model)
    passes = []
    for _ in range(7):
        infer(model, images)
        passes.append(dict(spent))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images)
    counts = counter.get_flop_counts()
    rows: list[Row] = []
    for (stage, part), names in parts.items():
        seconds = min(sum(times[name] for name in names) for times in passes)
        operations = sum(sum(counts[f"{type(model).__name__}.{name}"].values()) for name in names)
        row: Row = {"stage": int(stage) + 1, "part": part, "seconds": seconds / len(images)}
        rows.append(row | {"multiply_adds": operations / (2 * len(images))})
    rest = min(times[""] for times in passes) / len(images) - sum(row["seconds"] for row in rows)
    return [*rows, {"stage": "all", "part": "the rest", "seconds": rest, "multiply_adds": 0}]


def page(content: Row) -> Page:
    built = "with" if content["native"] else "without"
    suffix = ", x multiply-adds"
    bare = ", ".join(
        f"{title.removesuffix(suffix)} {value:.2f}"
        for title, value in content["numbers"].items()
        if title.endswith(suffix)
    )
    note = f"""\
float32, batch 4 of 224 x 224 where nothing else is said, {built} the compiled code of `softmaxfree
build`; "torch only" is without it. Contestants run in turns; best times. "core" is the attention
without projections, batch, heads, tokens, m = 49, d = 32, divided by its three matrix products
(with the backward pass nine) at the rate of a 1024 x 1024 product in the same run; rows of softx
are of the same cases, with queries that are not keys. "as released" is the same model computed as
the authors' code does. "49 landmarks" is `num_landmarks=49`, one image. Whole models
divided by their multiply-adds at that rate, in inference: {bare}."""
    promises = columns(
        content["rows"],
        Column("what", "what"),
        Column("measured", "measured", 2),
        Column("target", lambda x: f"{'at least' if x['least'] else 'at most'} {x['target']:g}"),
        Column("stretch", "stretch", 2),
        Column("verdict", "verdict"),
    )
    total = sum(row["seconds"] for row in content["stages"])
    where = columns(
        content["stages"],
        Column("stage", lambda row: str(row["stage"])),
        Column("part", "part"),
        Column("ms an image", "seconds", 1, 1e-3),
        Column("%", lambda row: row["seconds"] / total, 0, 0.01),
        Column("G multiply-adds", lambda row: row["multiply_adds"] or None, 2, 1e9),
        Column("G operations/s", lambda x: 2 * x["multiply_adds"] / x["seconds"] or None, 0, 1e9),
    )
    heading = Note(f"Where the time of `{SMALL}` goes:")
    return Page(
        "Speed: what is promised, and what was measured", [promises, Note(note), heading, where]
    )
