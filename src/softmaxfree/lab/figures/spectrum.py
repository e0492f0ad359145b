"""`softmaxfree figures spectrum`: eigenvalues of a landmark matrix, norms against m."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from ...analysis.attention_record import AttentionRecord
from ...analysis.measures import largest_eigenvalue
from ...errors import UserError
from ...imports import Names, import_modules
from ...layers.attention import SoftmaxFreeAttention
from ...ops.inverse import INVERSES
from ...ops.kernel import kernel_matrix
from ...ops.matrices import eigenvalues
from ..measure import exponent
from ..pictures import COLORS
from ..results import table
from .drawing import panels, save
from .subject import Subject, given_images, subjects

SIDES = [7, 10, 14, 18, 24, 32]
"""Sides of the grids of landmarks; images are enlarged to get them."""
SHOWN = 14
"""The side of the grid whose eigenvalues are drawn."""
IMAGES = 4
STEPS = 20
"""Steps of the paper's iteration."""

METHODS = {"soft": ("SOFT", "A⁺"), "softpp": ("SOFT++", "D⁻¹ᐟ²A⁺D⁻¹ᐟ²")}
NORMS = {
    "soft": "|A^+|",
    "softpp": "|D^-1/2 A^+ D^-1/2|",
    "soft_attention": "|A A^+ A|",
    "softpp_attention": "|A D^-1/2 A^+ D^-1/2 A|",
}
"""What is measured of each matrix."""
PAPER = {"soft": 2, "softpp": 1}
"""The paper's exponents of the norms of the inverse."""
LINES = {"exact": "-", "newton": "--"}
MARKERS = {"exact": "+", "newton": "."}


Row = dict[str, Any]
"""One head of one image: image, head, m, inverse (`exact`, or the paper's iteration, `newton`),
full_rank (whether float64 resolves all eigenvalues of A; A^+ leaves out those it does not), and
`NORMS`."""


def landmark_matrix(subject: Subject, image: Image.Image, side: int) -> Tensor:
    """The first layer's landmark matrix, (heads, m, m), the image resized so that m ~ side^2.

    The model makes the landmarks as ever; their kernel is computed in float64, because float32
    rounds away the smallest eigenvalues.
    """
    record = next(iter(subject.record(image).values()))
    attention = record.attention
    if not isinstance(attention, SoftmaxFreeAttention) or attention.middle == "sums":
        raise UserError(
            f"{subject.title} has no landmark matrices to invert; give the checkpoint of a model "
            "with SOFT or SOFT++"
        )
    sampler: Any = attention.sampler
    if sampler.num_landmarks is not None:
        raise UserError(
            f"{subject.title} has {sampler.num_landmarks} landmarks at all sizes; take a model "
            "whose number of landmarks grows with the image"
        )
    now = math.sqrt(_landmarks_of(record).shape[-2] - attention.prefix_tokens)
    size = round(subject.classifier.size * side / now)
    return kernel_matrix(_landmarks_of(subject.record(image, size)[record.name])[0].double())


@torch.no_grad()
def _landmarks_of(record: AttentionRecord) -> Tensor:
    """The landmarks as the kernel gets them, (1, heads, m, d)."""
    assert isinstance(record.attention, SoftmaxFreeAttention)
    return record.attention.landmarks(record.q, record.k, record.layout)[0]


def measured(name: str, matrices: Iterable[Tensor]) -> Iterator[Row]:
    """Yields the norms of an image's landmark matrices (heads, m, m), one for each m."""
    for a in matrices:
        values = eigenvalues(a)  # (heads, m)
        lost = torch.finfo(a.dtype).eps * a.shape[-1] * values[:, -1]
        full_rank = (values[:, 0] > lost).tolist()
        root = a.sum(-1).rsqrt()
        for inverse in ("exact", "newton"):
            x = INVERSES[inverse](a, STEPS, 0.0)
            z = root.unsqueeze(-1) * x * root.unsqueeze(-2)
            norms = [largest_eigenvalue(y).tolist() for y in (x, z, a @ x @ a, a @ z @ a)]
            for head, found in enumerate(zip(*norms)):
                about = {"image": name, "head": head, "m": a.shape[-1], "inverse": inverse}
                yield about | {"full_rank": full_rank[head]} | dict(zip(NORMS, found))


def mean_norms(found: Sequence[Row], inverse: str, quantity: str) -> dict[int, float]:
    """The (geometric) mean norms by size m; of the exact inverse where all have full rank."""
    own = [row for row in found if row["inverse"] == inverse]
    lost = {row["m"] for row in own if not row["full_rank"] and inverse == "exact"}
    return {
        m: statistics.geometric_mean(row[quantity] for row in own if row["m"] == m)
        for m in sorted({row["m"] for row in own} - lost)
    }


def growth(found: Sequence[Row], inverse: str, quantity: str) -> float | None:
    """The p of norm ~ m^p, or None if fewer than two sizes have full rank."""
    means = mean_norms(found, inverse, quantity)
    return exponent([*means], [*means.values()]) if len(means) > 1 else None


def draw_spectrum(
    checkpoint: Path | None = None,
    images: list[Path] | None = None,
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw the eigenvalues of a landmark matrix, and how the norm of its inverse grows.

    Spectral norms of A^+ and of D^-1/2 A^+ D^-1/2 against the number of landmarks m, from
    49 to 1,024, with the fitted exponents beside the paper's m^2 and m.

    Args:
        checkpoint: Trained weights of a classifier with SOFT or SOFT++, such as runs/mine;
            default: the SOFT++ model that comes with the package.
        images: Image files, such as [cat.jpg,dog.jpg]; default: 4 handwritten digits.
        out: Folder for spectrum.png, spectrum.svg and spectrum.csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    import_modules(modules)
    (subject,) = subjects([checkpoint] if checkpoint else None, embedded=["softpp"])
    given = given_images(images, IMAGES)
    found: list[Row] = []
    shown: dict[str, Tensor] = {}
    for name, image in tqdm(given.items(), "spectrum", leave=False):
        matrices = {side: landmark_matrix(subject, image, side) for side in SIDES}
        shown[name] = eigenvalues(matrices[SHOWN]).flip(-1)
        found += measured(name, matrices.values())
    figure, (axes,) = panels(3, width=4.3, height=4.2)
    _draw_eigenvalues(axes[0], shown)
    _draw_norms(axes[1], found, "")
    axes[1].set(title="the inverse", ylabel="spectral norm")
    axes[1].axhline(100, color="black", linewidth=0.8, linestyle=(0, (1, 3)))
    most = max(row["m"] for row in found)
    axes[1].text(most, 110, "most with the default ridge", ha="right", va="bottom", fontsize=9)
    _draw_norms(axes[2], found, "_attention")
    axes[2].set(title="attention among landmarks", ylabel="spectral norm")
    for ax in axes:
        ax.grid(alpha=0.3)
    save(figure, [*_eigenvalue_rows(shown), *found], out / "spectrum")
    print(growth_table(found))


def _draw_eigenvalues(ax: Any, shown: dict[str, Tensor]) -> None:
    for number, values in enumerate(torch.cat([*shown.values()]).clamp(min=1e-17).tolist()):
        label = None if number else "one head of one image"
        ax.plot(
            range(1, len(values) + 1), values, color=COLORS["softpp"], alpha=0.4, lw=1, label=label
        )
    ax.axhline(0.01, color="black", linewidth=0.8, linestyle=(0, (1, 3)))
    ax.text(len(values), 0.014, "default ridge", ha="right", fontsize=9)
    ax.set(yscale="log", xlabel="number of the eigenvalue", ylabel="eigenvalue")
    ax.set_title(f"eigenvalues of A, m = {len(values)}")
    ax.legend(frameon=False)


def _draw_norms(ax: Any, found: Sequence[Row], suffix: str) -> None:
    for name, (title, formula) in METHODS.items():
        quantity = name + suffix
        what = f"A·{formula}·A" if suffix else formula
        for inverse, line in LINES.items():
            places = [(row["m"], row[quantity]) for row in found if row["inverse"] == inverse]
            color = {"color": COLORS[name]}
            ax.plot(*zip(*places), MARKERS[inverse], alpha=0.5, markersize=5, **color)
            power = growth(found, inverse, quantity)
            label = f"{title}: {what}, {'exact' if inverse == 'exact' else f'{STEPS} steps'}"
            if power is not None:
                label += f"  ~ $m^{{{power:z.1f}}}$"
            if quantity in PAPER:
                label += f" (paper $m^{PAPER[quantity]}$)"
            means = mean_norms(found, inverse, quantity)
            ax.plot([*means], [*means.values()], line, label=label, **color)
    sizes = sorted({row["m"] for row in found})
    ax.set(xscale="log", yscale="log", xlabel="landmarks m")
    ax.set_xticks(sizes, [f"{m:,}" for m in sizes])
    ax.minorticks_off()
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=9)


def _eigenvalue_rows(shown: dict[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {"image": image, "head": head, "m": len(values), "number": number, "eigenvalue": value}
        for image, heads in shown.items()
        for head, values in enumerate(heads.tolist())
        for number, value in enumerate(values, 1)
    ]


def growth_table(found: Sequence[Row]) -> str:
    """The fitted exponents beside the paper's."""
    rows = []
    for quantity, title in NORMS.items():
        powers = [growth(found, inverse, quantity) for inverse in LINES]
        cells = ["-" if power is None else f"{power:z.2f}" for power in powers]
        rows.append([title, *cells, str(PAPER.get(quantity, "-"))])
    header = ["spectral norm", "exact: m^", f"{STEPS} steps: m^", "paper: m^"]
    used = [*mean_norms(found, "exact", "soft")]
    note = f"The exact inverse is fitted where A has full rank in float64, m = {used}.\n\n"
    return note + table(header, rows)
