"""`softmaxfree bench segmentation`: UperNet's cost beside the paper's, and one large image."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from ...environment import command_line
from ...imports import needs
from ...layers.attention import SoftmaxFreeAttention
from ...layers.multihead import Layout
from ...models.build import BackboneConfig
from ...models.cost import Cost, cost_of
from ...models.segmenters import Segmenter, build_segmenter
from ..results import provenance, result, table, write
from .image import SWIN, Entry, measure
from .image import report as report_rows

with needs("segmentation", "measuring segmenters"):
    from ...tasks.segmentation import Segmentation
    from ...tasks.windows import places

CLASSES = 19
IMAGE, WINDOW, STEP = (1024, 2048), 768, 512
REPEATS = 2
SECONDS = 40.0
"""A contestant that has taken longer is not timed again."""


def windows(size: tuple[int, int], window: int, step: int) -> int:
    """How many an image is cut into."""
    height, width = size
    return len(places(height, window, step)) * len(places(width, window, step))


@dataclass(frozen=True)
class Contestant:
    """UperNet on a backbone of timm, by its name and options, and what of it is measured.

    what: A name in `WHAT`.
    size: Of the image.
    window, step: Of the windows that it is cut into; whole if not given.
    """

    title: str
    what: str
    backbone: str
    options: dict[str, Any]
    size: tuple[int, int]
    window: int | None = None
    step: int | None = None

    def build(self) -> Segmentation:
        torch.manual_seed(0)
        return Segmentation(
            "upernet",
            self.backbone,
            CLASSES,
            options=self.options,
            window=self.window,
            step=self.step,
        ).eval()

    def image(self) -> Tensor:
        """Noise, the same whenever asked for."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(256, (3, *self.size), dtype=torch.uint8, generator=generator)

    def infer(self, task: Segmentation, image: Tensor) -> dict[str, Any]:
        """The shape of the logits, or of the last map of a backbone alone."""
        with torch.no_grad():
            if self.what == "backbone":
                model = cast(Segmenter, task.model)
                out = model.maps(task.normalised(image).unsqueeze(0))[-1][0]
            else:
                out = task(image)
        return {"output": list(out.shape)}

    def cost(self, task: Segmentation, image: Tensor) -> Cost:
        if self.window is None:
            size, times = self.size, 1
        else:
            assert self.step is not None
            size, times = (self.window, self.window), windows(self.size, self.window, self.step)
        parts = count(self.backbone, self.options, CLASSES, size)
        if self.what == "backbone":
            return Cost(parts.body_parameters, parts.body, parts.inverse)
        return Cost(parts.parameters, times * parts.multiply_adds, times * parts.inverse)


WHAT = {
    "backbone": "backbone",
    "window": "window",
    "windows": f"{windows(IMAGE, WINDOW, STEP)} windows",
    "image": "whole",
}
_SMALL = ("softpp_small, 49 tokens", "softpp_small", {"num_landmarks": 49})
CONTESTANTS = [
    *(
        Contestant(title, what, backbone, options, (WINDOW, WINDOW))
        for what in ("backbone", "window")
        for title, backbone, options in (
            _SMALL,
            (SWIN, "swin_tiny_patch4_window7_224", {}),
            ("PVTv2-B2", "pvt_v2_b2", {}),
        )
    ),
    Contestant(_SMALL[0], "windows", *_SMALL[1:], IMAGE, WINDOW, STEP),
    Contestant(_SMALL[0], "image", *_SMALL[1:], IMAGE),
]


@dataclass(frozen=True)
class Setting:
    """Images of a kind, and the paper's M parameters and G multiply-adds by backbone."""

    data: str
    classes: int
    side: int
    paper: dict[str, tuple[int, int]]

    @property
    def title(self) -> str:
        return f"{self.data}, {self.side} x {self.side} pixels, {self.classes} classes"


PAPER = [
    Setting(
        "ADE20K",
        150,
        512,
        {
            "softpp_small": (60, 237),
            "softpp_medium": (81, 260),
            "softpp_large": (121, 301),
            "swin_tiny_patch4_window7_224": (60, 236),
            "convnext_tiny": (60, 235),
        },
    ),
    Setting(
        "Cityscapes",
        19,
        768,
        {"softpp_small": (60, 545), "softpp_medium": (81, 607), "softpp_large": (121, 899)},
    ),
]
TITLES = {"swin_tiny_patch4_window7_224": SWIN, "convnext_tiny": "ConvNeXt-T"}

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
training, does not run; its 0.9 M parameters (1.2 M on large) are counted, as in the paper.
"inverse" is the part that inverts landmark matrices, "kernel" the part that compares tokens with
landmarks and these with each other. Without "49 tokens" the number of landmarks
grows with the image: 256 at 512 x 512, 576 at 768 x 768.

The decoder is the paper's: with Swin-T and ConvNeXt-T parameters and multiply-adds are within 0.5 %
of those printed. It takes 211 G at 512 x 512 and 473 G at 768 x 768, on large 212 and 475: 65 to
90 % of all.

Parameters are 1.2 to 2.1 % fewer than printed. With the classifier's last layers, 0.8 to 1 M which
a segmenter does not use and which are not built here, small and medium are the paper's within
rounding, and large is 1 % below.

The paper's multiply-adds lie between those with 49 tokens and those with a growing number. From
ADE20K to Cityscapes they grow faster than the pixels: the number grew. Less inverses and kernels
five of the six are met within 1 %. How they were counted is a guess: the authors' code can compute
the kernel by an operation of its own, which tools that count torch's operations do not see.

The sixth is the 899 G of large on Cityscapes. Counted in this way it would take images of more than
864 x 864, and small and medium fit 768 x 768; at 512 x 1024 the three would be 480, 535 and 612 G.
699 G would be met within 1 %, so that the first digit is likely a slip."""


@dataclass(frozen=True)
class Parts:
    """Parameters of UperNet, the auxiliary head's included, and multiply-adds of an image.

    rest: Those of the backbone but for the following.
    products: Of tokens, landmarks and values in softmax-free attention.
    kernel: Of these, the ones that compare tokens.
    """

    parameters: int
    body_parameters: int
    rest: float
    products: float
    kernel: float
    inverse: float
    decoder: float

    @property
    def body(self) -> float:
        return self.rest + self.products + self.inverse

    @property
    def multiply_adds(self) -> float:
        return self.body + self.decoder


def count(backbone: str, options: dict[str, Any], classes: int, size: tuple[int, int]) -> Parts:
    """Counts in evaluation, from shapes alone, as nothing is computed.

    Products and inverses are counted by formula: without numbers other inverses are taken, and
    on large maps a part of the kernel is computed twice to save memory.
    """
    with torch.device("meta"):
        model = build_segmenter("upernet", classes, BackboneConfig(backbone, options=options))
        images = torch.empty(1, 3, *size)
    products = kernel = 0

    def attend(
        attention: SoftmaxFreeAttention, q: Tensor, k: Tensor, v: Tensor, at: Layout
    ) -> Tensor:
        nonlocal products, kernel
        landmarks = attention.landmark_norm(attention.sample(q, at.size, None)[0])
        (_, heads, m, d), n = landmarks.shape, q.shape[2]
        products += heads * d * (3 * n * m + 2 * m**2)  # P, P^T V, P x; A and A^+ x
        kernel += heads * d * (n * m + m**2)
        return v

    for module in model.modules():
        if isinstance(module, SoftmaxFreeAttention):
            module.attend = partial(attend, module)  # type: ignore[method-assign]
    whole = cost_of(model, images)
    products = kernel = 0
    body = cost_of(model.body, images)
    return Parts(
        whole.parameters,
        body.parameters,
        body.multiply_adds,
        products,
        kernel,
        body.inverse,
        whole.multiply_adds - body.multiply_adds,
    )


def figures() -> list[dict[str, Any]]:
    """UperNet's parameters and multiply-adds in every setting, beside the paper's."""
    rows = []
    cases = [(setting, backbone) for setting in PAPER for backbone in setting.paper]
    for setting, backbone in tqdm(cases, desc="counting", unit="model", leave=False):
        ours = backbone not in TITLES
        for options in ({"num_landmarks": 49}, {}) if ours else ({},):
            parts = count(backbone, options, setting.classes, (setting.side, setting.side))
            parameters, multiply_adds = setting.paper[backbone]
            rows.append(
                {
                    "data": setting.data,
                    "title": TITLES.get(backbone, backbone + (", 49 tokens" if options else "")),
                    "backbone": backbone,
                    "options": options,
                    "classes": setting.classes,
                    "size": [setting.side, setting.side],
                    "parameters": parts.parameters,
                    "paper_parameters_m": parameters,
                    "multiply_adds": parts.multiply_adds,
                    "decoder_multiply_adds": parts.decoder,
                    "inverse_multiply_adds": parts.inverse,
                    "kernel_multiply_adds": parts.kernel,
                    "paper_multiply_adds_g": multiply_adds,
                }
            )
    return rows


def run(threads: int, out: Path) -> dict[str, Any]:
    """Counts, then measures in turns; writes JSON, CSV and Markdown; prints the tables."""
    counted = figures()
    entries = [Entry(asdict(x), x.build, x.image, x.infer, x.cost) for x in CONTESTANTS]
    rows = measure(entries, "segmentation", threads, REPEATS, SECONDS)
    content = result(command_line(), rows, figures=counted)
    stem = out / "segmentation"
    write(stem, content, markdown(content))
    print(f"{report(content)}\n\n{report_figures(content)}")
    print(f"\nwritten: {stem}.json, .csv and .md")
    return content


def report(content: dict[str, Any], markdown: bool = False) -> str:
    return report_rows(content["rows"], "what", WHAT, markdown)


def report_figures(content: dict[str, Any], markdown: bool = False) -> str:
    """A table for each setting."""
    header = [
        "backbone", "M params", "paper", "G m-adds", "inverse", "kernel", "less both", "paper",
    ]  # fmt: skip
    parts = []
    for setting in PAPER:
        lines = [
            [
                row["title"],
                f"{row['parameters'] / 1e6:.2f}",
                str(row["paper_parameters_m"]),
                f"{row['multiply_adds'] / 1e9:.1f}",
                f"{row['inverse_multiply_adds'] / 1e9:.1f}",
                f"{row['kernel_multiply_adds'] / 1e9:.1f}",
                f"{less_both(row) / 1e9:.1f}",
                str(row["paper_multiply_adds_g"]),
            ]
            for row in content["figures"]
            if row["data"] == setting.data
        ]
        parts += [f"{setting.title}:", "", table(header, lines, 1, markdown), ""]
    return "\n".join(parts).rstrip()


def less_both(row: dict[str, Any]) -> float:
    """Multiply-adds without those of inverses and kernels."""
    total: float = row["multiply_adds"]
    return total - row["inverse_multiply_adds"] - row["kernel_multiply_adds"]


def markdown(content: dict[str, Any]) -> str:
    return f"""\
# Segmentation: UperNet on a large image

{provenance(content)}

{report(content, markdown=True)}

{NOTES}

## Parameters and multiply-adds beside the paper's

{report_figures(content, markdown=True)}

{NOTES_ON_FIGURES}
"""
