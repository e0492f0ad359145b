"""`softmaxfree models`: every variant, its size and its cost, beside the paper's figures."""

from pathlib import Path
from typing import Any

import timm
from tqdm import tqdm

from ...environment import command_line
from ...layers.attention import SoftmaxFreeAttention
from ...models.cost import cost
from ..results import provenance, result, table, write

Figures = tuple[float | None, float | None]
"""Millions of parameters and G multiply-adds at 224 x 224, as printed in the paper."""

PAPER: dict[str, Figures] = {
    "tiny": (13, 1.9),
    "small": (27, 4.5),
    "medium": (48, 8.7),
    "large": (85, 15.4),
    "tiny_fudan": (13, 1.9),
}
"""By the end of a variant's name."""

ABLATIONS: list[tuple[dict[str, Any], Figures]] = [
    ({"sampler": "conv"}, (13.07, 2.0)),
    ({"sampler": "random"}, (12.96, 1.9)),
    ({"sampler": "biased"}, (12.96, 1.9)),
    ({"sampler": "avg"}, (12.96, 1.9)),
    ({"num_landmarks": 36}, (None, 1.9)),
    ({"num_landmarks": 49}, (None, 1.9)),
    ({"num_landmarks": 64}, (None, 2.0)),
    ({"num_landmarks": 81}, (None, 2.1)),
]
"""Of the released tiny: the paper's tables of sampling methods and of landmarks."""

NOTES = """\
G multiply-adds are those of one image, without the inverses of the landmark matrices, as the
paper counts, and with them. `auto` inverts by a Cholesky factorisation; the 20 Newton steps of
`damped` and `backtrack`, with which the released weights were trained, cost eighty times as much.

small, medium, large: the journal's table with softmax-free attention in stage 4 and a stem of
  width 32 fits the paper's figures best; its "64/128/256/512-d" beside the convolutions does not.
tiny: the table's depths (2, 2, 5, 2) make 14.9 M. The 13 M and 1.9 G of the paper are those of
  the released tiny (1, 2, 3, 2): tiny_fudan.
fudan: as the authors' code builds them, with softmax in stage 4. Their README's 24 M and 3.3 G
  for small are of depths (1, 3, 7, 4), which the code does not build. The paper has no others.
sampler, tokens: the paper's ablations, on the released tiny.
nano, vit: have no figures in the paper. nano is measured at 32 x 32. softx is not in it: SOFT++
  with what gained in short runs at equal cost.
SOFT and SOFT++ differ in nothing that is counted here but the inverse of the fudan models."""


def models(out: Path | None = None) -> dict[str, Any]:
    """List every backbone: parameters and multiply-adds, beside the paper's figures.

    Args:
        out: Folder for models.json, models.csv and models.md; printed only if not given.
    """
    names = sorted(filter(_is_ours, timm.list_models("soft*")), key=_order)
    variants: list[tuple[str, dict[str, Any], Figures]] = [
        (name, {}, PAPER.get(name.split("_", 1)[1], (None, None))) for name in names
    ]
    variants += [("soft_tiny_fudan", arguments, paper) for arguments, paper in ABLATIONS]
    rows = []
    for name, arguments, paper in tqdm(variants, desc="models", unit="model", leave=False):
        model = timm.create_model(name, **arguments)
        found = cost(model, *model.default_cfg["input_size"])
        (inverse,) = {
            module.inverse for module in model.modules() if isinstance(module, SoftmaxFreeAttention)
        }
        rows.append(
            {
                "model": name,
                "arguments": arguments,
                "inverse": inverse,
                "parameters": found.parameters,
                "paper_parameters_m": paper[0],
                "multiply_adds": found.multiply_adds,
                "inverse_multiply_adds": found.inverse,
                "paper_multiply_adds_g": paper[1],
                "input_size": list(model.default_cfg["input_size"]),
            }
        )
    content = result(command_line(), rows)
    print(report(content))
    print(f"\n{NOTES}")
    if out is not None:
        write(out / "models", content, markdown(content))
        print(f"\nwritten: {out}/models.json, .csv and .md")
    return content


def _is_ours(name: str) -> bool:
    return timm.model_entrypoint(name).__module__.startswith("softmaxfree.")


def _order(name: str) -> tuple[bool, int, str]:
    """Released ones last, small ones first, SOFT before SOFT++."""
    sizes = ["nano", "tiny", "small", "medium", "large", "huge", "vit"]
    _, size, *rest = name.split("_")
    return "fudan" in rest, sizes.index(size), name


def report(content: dict[str, Any], markdown: bool = False) -> str:
    header = ["model", "inverse", "params M", "paper", "G mult-adds", "with inverse", "paper"]
    lines = [
        [
            ", ".join([row["model"], *(f"{k}={v}" for k, v in row["arguments"].items())]),
            row["inverse"],
            f"{row['parameters'] / 1e6:.2f}",
            _number(row["paper_parameters_m"]),
            f"{(row['multiply_adds'] - row['inverse_multiply_adds']) / 1e9:.3f}",
            f"{row['multiply_adds'] / 1e9:.3f}",
            _number(row["paper_multiply_adds_g"]),
        ]
        for row in content["rows"]
    ]
    return table(header, lines, 2, markdown)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def markdown(content: dict[str, Any]) -> str:
    return f"""\
# Models

{provenance(content)}

{report(content, markdown=True)}

{NOTES}
"""
