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
from ...models.cost import cost, image_bytes
from ...ops.backends import native, torch_only
from ..measure import Timing, square_product, time_interleaved
from ..results import Note, Page, Table, number, publish, result
from . import busy
from .contestants import CPU, OPERATIONS, Case, verify
from .models import ComparedModel, infer, train
from .runner import Call, Row

CORE = [Case(1, 2, 3136), Case(8, 2, 3136), Case(1, 12, 6272), Case(8, 10, 196)]

SMALL, SWIN, CONVNEXT = "softpp_small", "Swin-T", "ConvNeXt-T"
TINY, PVT = "softpp_tiny_fudan", "PVTv2-B1"
RELEASED = "softpp_small as released"

MODELS = {
    contestant.title: contestant
    for contestant in (
        ComparedModel(SMALL, "softpp_small"),
        ComparedModel(RELEASED, "softpp_small", as_released=True),
        ComparedModel(SWIN, "swin_tiny_patch4_window7_224"),
        ComparedModel(CONVNEXT, "convnext_tiny"),
        ComparedModel("DeiT-S", "deit_small_patch16_224"),
        ComparedModel(TINY, "softpp_tiny_fudan", arguments={"inverse": "auto"}),
        ComparedModel(PVT, "pvt_v2_b1"),
    )
}
"""At 224 x 224, batch 4."""

LARGE = {
    contestant.title: contestant
    for contestant in (
        ComparedModel(
            "softpp_small, 49 landmarks", "softpp_small", arguments={"num_landmarks": 49}
        ),
        ComparedModel(SWIN, "swin_tiny_patch4_window7_224", sized=True),
        ComparedModel("PVTv2-B2", "pvt_v2_b2"),
    )
}
SIDES = (512, 1024)
IMAGES = (4, 3, 224, 224)
PARTS = {"embed": "embedding", "attention": "attention", "mlp": "feed-forward"}


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
    verify(["op_softpp"])
    promises: list[Promise] = []
    numbers: dict[str, float] = {}
    parts = (_core, _models, _threads, _memory, _large, _waiting, _start)
    try:
        for part in tqdm(parts, desc="bench speed", unit="part", leave=False):
            promises += part(numbers)
        breakdown = stages()
    finally:
        torch.set_num_threads(before)
    rows = [{**asdict(promise), "verdict": promise.verdict} for promise in promises]
    content = result(command_line(), rows, numbers=numbers)
    content |= {"threads": 1, "stages": breakdown}
    return publish(out / "speed", content, page)


def _both_ways(title: str, call: Call) -> dict[str, Call]:
    """A contestant, and the same without the compiled code, if that is built."""

    def by_torch() -> None:
        with torch_only():
            call()

    return {title: call, **({f"{title}, torch only": by_torch} if native.library() else {})}


def _timed(
    numbers: dict[str, float], kind: str, calls: dict[str, Call], **options: Any
) -> tuple[dict[str, Timing], float]:
    """Timings in turns, and the operations per second of a large square product beside them."""
    product, operations = square_product()
    timings = time_interleaved({"": product, **calls}, **options)
    rate = operations / timings.pop("").best
    numbers |= {f"{title}, {kind}": timing.best for title, timing in timings.items()}
    return timings, rate


def _core(numbers: dict[str, float]) -> Iterator[Promise]:
    """Each case against its matrix products at the rate of a large one."""
    for case in CORE:
        ready = OPERATIONS["op_softpp"].ready(case, CPU)
        where = f"{case.batch}, {case.heads}, {case.n}"
        forward, rate = _timed(
            numbers, "forward", _both_ways(f"core {where}", ready.forward), repeats=15, seconds=5
        )
        both, rate_both = _timed(
            numbers, "forward and backward", _both_ways(f"core {where}", ready.training),
            repeats=15, seconds=5,
        )  # fmt: skip
        long = case.n >= 3136
        for title in forward:
            alone = forward[title].best * rate / case.products()
            limits = (1.9, False, 1.4) if long else (3.5, False, 2.2)
            yield Promise(f"{title}: x products", alone, *limits)
            all_of_it = both[title].best * rate_both / (3 * case.products())
            limits_both = (2.2, False, 1.6) if long else (3.2, False, None)
            yield Promise(f"{title}, f+b: x products", all_of_it, *limits_both)


def _models(numbers: dict[str, float]) -> Iterator[Promise]:
    images = torch.randn(IMAGES, generator=torch.Generator().manual_seed(0))
    models = {title: contestant.build(224) for title, contestant in MODELS.items()}
    for kind, step in (("inference", infer), ("training", train)):
        calls: dict[str, Call] = {
            title: partial(step, model.train(kind == "training"), images)
            for title, model in models.items()
        }
        calls |= _both_ways(SMALL, calls[SMALL])
        found, rate = _timed(numbers, kind, calls, repeats=7, seconds=20)

        def ratio(ours: str, theirs: str, found: dict[str, Timing] = found) -> float:
            return found[theirs].best / found[ours].best

        for name in _both_ways(SMALL, calls[SMALL]):
            stretch = ratio(CONVNEXT, SWIN)
            yield Promise(f"{name}, {kind}: x {SWIN}", ratio(name, SWIN), 1.0, True, stretch)
        released = 1.6 if kind == "inference" else 2.3
        yield Promise(f"{SMALL}, {kind}: x as released", ratio(SMALL, RELEASED), released)
        yield Promise(f"{TINY}, {kind}: x {PVT}", ratio(TINY, PVT), 1.4)
        if kind == "inference":
            for title in (SMALL, "DeiT-S", CONVNEXT, SWIN, PVT):
                operations = 2 * len(images) * cost(models[title], *IMAGES[1:]).multiply_adds
                bare = found[title].best * rate / operations
                numbers[f"{title}, x multiply-adds"] = bare
                if title == SMALL:
                    yield Promise(
                        f"{SMALL}: x multiply-adds at the products' rate", bare, 1.4, False
                    )


def _threads(numbers: dict[str, float]) -> Iterator[Promise]:
    images = torch.randn(IMAGES, generator=torch.Generator().manual_seed(0))
    model = MODELS[SMALL].build(224)

    def with_threads(count: int, step: Callable[[nn.Module, Tensor], None]) -> None:
        torch.set_num_threads(count)
        try:
            step(model, images)
        finally:
            torch.set_num_threads(1)

    for kind, step in (("inference", infer), ("training", train)):
        model.train(kind == "training")
        calls: dict[str, Call] = {
            f"{SMALL}, {count} threads": partial(with_threads, count, step) for count in (1, 2)
        }
        found, _ = _timed(numbers, kind, calls, repeats=7, seconds=15)
        one, two = found.values()
        yield Promise(f"{SMALL}, {kind}: two threads x one", one.best / two.best, 1.8)


def _memory(numbers: dict[str, float]) -> Iterator[Promise]:
    kept = {title: image_bytes(MODELS[title].build(224), *IMAGES[1:]) for title in (SMALL, SWIN)}
    yield Promise(
        f"{SMALL}, memory of training an image: x {SWIN}", kept[SMALL] / kept[SWIN], 1, False
    )


def _large(numbers: dict[str, float]) -> Iterator[Promise]:
    for side in SIDES:
        images = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
        calls: dict[str, Call] = {
            title: partial(infer, contestant.build(side).eval(), images)
            for title, contestant in LARGE.items()
        }
        found, _ = _timed(numbers, f"{side} pixels", calls, repeats=5, seconds=20)
        ours, swin, pvt = (found[title].best for title in LARGE)
        yield Promise(f"{SMALL}, 49 landmarks, {side} pixels: x {SWIN}", swin / ours, 1.0)
        yield Promise(f"{SMALL}, 49 landmarks, {side} pixels: x PVTv2-B2", pvt / ours, 1.2)


def stages() -> list[Row]:
    """Where the time of `softpp_small` in inference goes: by stage and part, per image.

    Seconds are the least of several passes, multiply-adds as counted by torch.
    """
    model = MODELS[SMALL].build(224).eval()
    images = torch.randn(IMAGES, generator=torch.Generator().manual_seed(0))
    started: dict[str, float] = {}
    spent: dict[str, float] = {}

    def watch(name: str, module: nn.Module) -> None:
        def start(*_: Any) -> None:
            started[name] = perf_counter()

        def stop(*_: Any) -> None:
            spent[name] = perf_counter() - started[name]

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
        rows.append(
            {
                "stage": int(stage) + 1,
                "part": part,
                "seconds": seconds / len(images),
                "multiply_adds": operations / (2 * len(images)),
            }
        )
    rest = min(times[""] for times in passes) / len(images) - sum(row["seconds"] for row in rows)
    return [*rows, {"stage": "all", "part": "the rest", "seconds": rest, "multiply_adds": 0}]


def _waiting(numbers: dict[str, float]) -> Iterator[Promise]:
    """What waiting threads cost: beside another program, and on an idle machine."""
    found = busy.measure()
    numbers |= {f"softpp_nano, training step {name}": value for name, value in found.items()}
    ratio = found["beside"] / found["alone"]
    yield Promise("softpp_nano, training beside another: x alone", ratio, 2.5, False)
    cost = found["alone"] / found["alone, GNU's default"]
    yield Promise("softpp_nano, training: x GNU's waiting", cost, 1.03, False)


_IMPORT = """
import timm
from time import perf_counter
before = perf_counter()
import softmaxfree
print(perf_counter() - before)
"""


def _start(numbers: dict[str, float]) -> Iterator[Promise]:
    def once() -> float:
        call = [sys.executable, "-c", _IMPORT]
        return float(subprocess.run(call, capture_output=True, text=True, check=True).stdout)

    numbers["import"] = min(once() for _ in range(3))
    yield Promise("import softmaxfree, seconds beyond import timm", numbers["import"], 0.3, False)


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
(with the backward pass nine) at the rate of a 1024 x 1024 product in the same run. "as released"
is the same model computed as the authors' code does. "49 landmarks" is
`num_landmarks=49`, one image. Whole models divided by their multiply-adds at that rate, in
inference: {bare}."""
    return Page(
        "Speed: what is promised, and what was measured",
        [
            promise_table(content["rows"]),
            Note(note),
            Note(f"Where the time of `{SMALL}` goes:"),
            stage_table(content["stages"]),
        ],
    )


def promise_table(rows: list[Row]) -> Table:
    lines = []
    for row in rows:
        target = f"{'at least' if row['least'] else 'at most'} {row['target']:g}"
        measured, stretch = number(row["measured"], 2), number(row["stretch"], 2)
        lines.append([row["what"], measured, target, stretch, row["verdict"]])
    return Table(["what", "measured", "target", "stretch", "verdict"], lines)


def stage_table(rows: list[Row]) -> Table:
    total = sum(row["seconds"] for row in rows)
    lines = []
    for row in rows:
        count, seconds = row["multiply_adds"] or None, row["seconds"]
        rate = number(count and 2 * count / seconds, 0, 1e9)
        share = number(seconds / total, 0, 0.01)
        times = [number(seconds, 1, 1e-3), share]
        lines.append([str(row["stage"]), row["part"], *times, number(count, 2, 1e9), rate])
    header = ["stage", "part", "ms an image", "%", "G multiply-adds", "G operations/s"]
    return Table(header, lines, 2)
