"""`softmaxfree models`: every variant, its size and its cost, beside the paper's figures."""

from pathlib import Path
from typing import Any

import timm
from tqdm import tqdm

from ...environment import command_line
from ...layers.attention import SoftmaxFreeAttention
from ...models.cost import cost
from ..paper import BACKBONES, LANDMARKS, SAMPLERS
from ..results import Column, Page, Row, columns, publish, result

ABLATED = "soft_tiny_fudan"
"""The model of the paper's ablations."""

NOTES = """\
G multiply-adds are those of one image, without the inverses of the landmark matrices, as the
paper counts, and with them. nano is measured at 32 x 32. Where these figures differ from the
paper's, and why: docs/backbones.md."""


def models(out: Path | None = None) -> Row:
    """List every backbone: parameters and multiply-adds, beside the paper's figures.

    Prints a table and, with --out, writes it as JSON, CSV and Markdown.

    Args:
        out: Folder for models.json, models.csv and models.md; printed only if not given.
    """
    rows = [
        _row(name, arguments, paper)
        for name, arguments, paper in tqdm(_variants(), desc="models", unit="model", leave=False)
    ]
    content = result(command_line(), rows)
    if out is not None:
        return publish(out / "models", content, page)
    print(page(content).printed())
    return content


def _variants() -> list[tuple[str, dict[str, Any], Row]]:
    """Names and arguments, with the paper's row where there is one."""
    ours = [
        name
        for name in timm.list_models("soft*")
        if timm.model_entrypoint(name).__module__.startswith("softmaxfree.")
    ]
    printed = {name: row._asdict() for name, row in BACKBONES.items()}
    ablations: list[tuple[dict[str, Any], Row]] = [
        *(({"sampler": name}, row) for name, row in SAMPLERS.items()),
        *(({"num_landmarks": m}, row) for m, row in LANDMARKS.items()),
    ]
    return [
        *((name, {}, printed.get(name, {})) for name in sorted(ours, key=_order)),
        *((ABLATED, arguments, row) for arguments, row in ablations),
    ]


def _order(name: str) -> tuple[bool, int, str]:
    """Released ones last, small ones first, SOFT before SOFT++."""
    sizes = ["nano", "tiny", "small", "medium", "large", "huge", "vit"]
    _, size, *rest = name.split("_")
    return "fudan" in rest, sizes.index(size), name


def _row(name: str, arguments: dict[str, Any], paper: Row) -> Row:
    model = timm.create_model(name, **arguments)
    found = cost(model, *model.default_cfg["input_size"])
    (inverse,) = {x.inverse for x in model.modules() if isinstance(x, SoftmaxFreeAttention)}
    return {
        "model": name,
        "arguments": arguments,
        "inverse": inverse,
        "parameters": found.parameters,
        "paper_parameters_m": paper.get("parameters_m"),
        "multiply_adds": found.multiply_adds,
        "inverse_multiply_adds": found.inverse,
        "paper_multiply_adds_g": paper.get("multiply_adds_g"),
        "input_size": list(model.default_cfg["input_size"]),
    }


def page(content: Row) -> Page:
    table = columns(
        content["rows"],
        Column("model", _title),
        Column("inverse", "inverse"),
        Column("params M", "parameters", 2, 1e6),
        Column("paper", "paper_parameters_m"),
        Column("G mult-adds", lambda x: x["multiply_adds"] - x["inverse_multiply_adds"], 3, 1e9),
        Column("with inverse", "multiply_adds", 3, 1e9),
        Column("paper", "paper_multiply_adds_g"),
    )
    return Page("Models", [table, NOTES])


def _title(row: Row) -> str:
    return ", ".join([row["model"], *(f"{k}={v}" for k, v in row["arguments"].items())])
