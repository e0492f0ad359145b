"""`softmaxfree bench segmentation`: UperNet's cost beside the paper's, and one large image."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from ...imports import needs
from ...layers.attention import SoftmaxFreeAttention
from ...layers.multihead import Layout
from ...models.build import BackboneConfig
from ...models.cost import Cost, cost_of
from ...models.segmenters import Segmenter, build_segmenter
from ..paper import SEGMENTATION
from ..results import Column, Note, Page, Row, Table, columns
from .runner import GROWING, SWIN, Benchmark, Call, Entry, image_table

with needs("segmentation", "measuring segmenters"):
    from ...tasks.segmentation import Segmentation
    from ...tasks.windows import places

CLASSES = 19
IMAGE, WINDOW, STEP = (1024, 2048), 768, 512
REPEATS = 2
SECONDS = 40.0
"""A contestant that has taken longer is not timed again."""


def windows(size: tuple[int, int], window: int, step: int) -> int:
    """How many windows an image is cut into."""
    height, width = size
    return len(places(height, window, step)) * len(places(width, window, step))


@dataclass(frozen=True)
class ComparedSegmenter:
    """UperNet on a backbone of timm, and which part of its work is measured.

    what: A key of `WHAT`.
    size: Height and width of the image.
    window, step: Of the windows that it is cut into; the image is not cut without them.
    """

    title: str
    what: str
    backbone: str
    options: dict[str, Any]
    size: tuple[int, int]
    window: int | None = None
    step: int | None = None

    def prepare(self) -> Call:
        """A pass of one image of noise, which is always the same."""
        torch.manual_seed(0)
        task = Segmentation(
            "upernet", self.backbone, CLASSES, options=self.options, window=self.window,
            step=self.step,
        ).eval()  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        image = torch.randint(256, (3, *self.size), dtype=torch.uint8, generator=generator)
        return partial(self.infer, task, image)

    def infer(self, task: Segmentation, image: Tensor) -> Row:
        """The shape of the logits, or of the last map of a backbone alone."""
        with torch.no_grad():
            if self.what == "backbone":
                model = cast(Segmenter, task.model)
                out = model.maps(task.normalised(image).unsqueeze(0))[-1][0]
            else:
                out = task(image)
        return {"output": list(out.shape)}

    def cost(self, _: Call) -> Cost:
        """Counted from shapes, whatever the call."""
        size, times = self.size, 1
        if self.window is not None and self.step is not None:
            size, times = (self.window, self.window), windows(self.size, self.window, self.step)
        whole, body = count(self.backbone, self.options, CLASSES, size)[:2]
        part = body if self.what == "backbone" else whole
        return Cost(part.parameters, times * part.multiply_adds, times * part.inverse)


WHAT = {
    "backbone": "backbone",
    "window": "window",
    "windows": f"{windows(IMAGE, WINDOW, STEP)} windows",
    "image": "whole",
}
_SMALL = ("softpp_small, 49 landmarks", "softpp_small", {"num_landmarks": 49})
SEGMENTERS = [
    *(
        ComparedSegmenter(title, what, backbone, options, (WINDOW, WINDOW))
        for what in ("backbone", "window")
        for title, backbone, options in (
            _SMALL,
            (SWIN, "swin_tiny_patch4_window7_224", {}),
            ("PVTv2-B2", "pvt_v2_b2", {}),
        )
    ),
    ComparedSegmenter(_SMALL[0], "windows", *_SMALL[1:], IMAGE, WINDOW, STEP),
    ComparedSegmenter(_SMALL[0], "image", *_SMALL[1:], IMAGE),
]
PEERS = {"swin_tiny_patch4_window7_224": SWIN, "convnext_tiny": "ConvNeXt-T"}

NOTES = f"""\
UperNet for {CLASSES} classes, untrained, on noise, float32.
window: one of {WINDOW} x {WINDOW} pixels; backbone: the maps of one, without the decoder.
{WHAT["windows"]}: an image of {IMAGE[0]} x {IMAGE[1]} by such windows, {STEP} pixels apart.
whole: the same image at once. The windows overlap and have 2.25 times its pixels.

Best of {REPEATS} interleaved repeats; what takes over {SECONDS:g} s is timed once.
"/ Swin-T" is the time as a multiple of that of the same on Swin-T: below 1 is faster. Only such
ratios carry over to other machines. Nine tenths of a window's multiply-adds are the decoder's,
which is the same for all. MB is the peak of a fresh process, libraries and weights included."""

NOTES_ON_FIGURES = """\
Multiply-adds of the forward pass in evaluation, every product once. The auxiliary head, for
training, does not run; its parameters are counted, as in the paper. "inverse" is the part that
inverts landmark matrices, "kernel" the part that compares tokens with landmarks and these with each
other. With "ratios" the number of landmarks grows with the image: 256 at 512 x 512, 576 at
768 x 768. [Segmentation](../docs/segmentation.md#beside-the-papers-figures) says where the
differences may come from."""


def count(
    backbone: str, options: dict[str, Any], classes: int, size: tuple[int, int]
) -> tuple[Cost, Cost, float]:
    """UperNet's cost in evaluation, that of its backbone, and the multiply-adds of the kernel.

    From shapes alone: nothing is computed. Attention is counted by formula: on the meta device
    another inverse would be chosen, and on large maps a part of the kernel is computed twice to
    save memory.
    """
    with torch.device("meta"):
        model = build_segmenter("upernet", classes, BackboneConfig(backbone, options=options))
        images = torch.empty(1, 3, *size)
    products = kernel = 0

    def attend(
        attention: SoftmaxFreeAttention, q: Tensor, k: Tensor, v: Tensor, at: Layout
    ) -> Tensor:
        nonlocal products, kernel
        landmarks, _ = attention.landmarks(q, k, at)
        (_, heads, m, d), n = landmarks.shape, q.shape[2]
        inverts = attention.middle == "inverse"
        kernels = 1 if k is q and inverts else 2  # P, or one of queries and one of keys
        own = heads * d * (kernels * n * m + inverts * m**2)  # with A
        kernel += own
        products += own + heads * d * (2 * n * m + inverts * m**2)  # P^T V, P x and A^+ x
        return v

    for module in model.modules():
        if isinstance(module, SoftmaxFreeAttention):
            module.attend = partial(attend, module)  # type: ignore[method-assign]
    whole, body = cost_of(model, images), cost_of(model.body, images)
    products, kernel = products // 2, kernel // 2  # of two passes
    own = body.inverse + products
    return (
        Cost(whole.parameters, whole.multiply_adds + own, body.inverse),
        Cost(body.parameters, body.multiply_adds + own, body.inverse),
        kernel,
    )


def figures() -> list[Row]:
    """UperNet's parameters and multiply-adds on every data set, beside the paper's."""
    rows = []
    cases = [
        (data, backbone) for data, printed in SEGMENTATION.items() for backbone in printed.rows
    ]
    for data, backbone in tqdm(cases, desc="counting", unit="model", leave=False):
        classes, side, printed = SEGMENTATION[data]
        for options in ({},) if backbone in PEERS else ({"num_landmarks": 49}, GROWING):
            whole, body, kernel = count(backbone, options, classes, (side, side))
            suffix = ", ratios" if options is GROWING else ", 49 landmarks"
            rows.append(
                {
                    "data": data,
                    "title": PEERS.get(backbone, backbone + suffix),
                    "backbone": backbone,
                    "options": options,
                    "classes": classes,
                    "size": [side, side],
                    "parameters": whole.parameters,
                    "paper_parameters_m": printed[backbone].parameters_m,
                    "multiply_adds": whole.multiply_adds,
                    "decoder_multiply_adds": whole.multiply_adds - body.multiply_adds,
                    "inverse_multiply_adds": whole.inverse,
                    "kernel_multiply_adds": kernel,
                    "paper_multiply_adds_g": printed[backbone].multiply_adds_g,
                }
            )
    return rows


def bench_segmentation(threads: int = 1, out: Path = Path("results")) -> Row:
    """Measure UperNet on one image of 1024 x 2048 pixels, and count its cost (9 minutes).

    On SOFT++, Swin-T and PVTv2, with untrained weights: time in turns and memory of a fresh
    process, for a window of 768 x 768 pixels and for its backbone alone; with SOFT++-Small also
    for the image, by windows and whole. A window takes 15 seconds. Parameters and multiply-adds
    stand beside the paper's. Prints tables and writes them as JSON, CSV and Markdown.

    Args:
        threads: Threads to compute with; ratios are most reliable with 1.
        out: Folder for the results.
    """
    bench, counted = Benchmark(threads, out), figures()
    entries = [Entry(asdict(x), partial(ComparedSegmenter.prepare, x), x.cost) for x in SEGMENTERS]
    rows = bench.measure(entries, "inference", REPEATS, SECONDS, "process")
    return bench.publish("segmentation", rows, page, figures=counted)


def page(content: Row) -> Page:
    return Page(
        "Segmentation: UperNet on a large image",
        [
            image_table(content["rows"], "what", WHAT),
            Note(NOTES),
            Note("## Parameters and multiply-adds beside the paper's"),
            *figure_tables(content["figures"]),
            Note(NOTES_ON_FIGURES),
        ],
    )


def figure_tables(rows: list[Row]) -> Iterator[str | Table]:
    """A table for each data set."""
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == data]
        side, classes = own[0]["size"][0], own[0]["classes"]
        yield f"{data}, {side} x {side} pixels, {classes} classes:"
        yield columns(
            own,
            Column("backbone", "title"),
            Column("M params", "parameters", 2, 1e6),
            Column("paper", "paper_parameters_m"),
            Column("G m-adds", "multiply_adds", 1, 1e9),
            Column("inverse", "inverse_multiply_adds", 1, 1e9),
            Column("kernel", "kernel_multiply_adds", 1, 1e9),
            Column("less both", less_both, 1, 1e9),
            Column("paper", "paper_multiply_adds_g"),
        )


def less_both(row: Row) -> float:
    """Multiply-adds without those of inverses and kernels."""
    total: float = row["multiply_adds"]
    return total - row["inverse_multiply_adds"] - row["kernel_multiply_adds"]
