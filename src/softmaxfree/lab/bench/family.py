"""`softmaxfree models`: every variant, its size and its cost, beside the paper's figures."""

from pathlib import Path
from typing import Any

from ..paper import BACKBONES, LANDMARKS, SAMPLERS
from ..results import Column, Page, Row, columns, publish, read, result

PACKAGE = Path(__file__).parents[2]

COUNTED = [folder / "results/models.json" for folder in (PACKAGE, PACKAGE.parents[1])]
"""The committed figures: in an installed package, and in a working copy."""
ABLATED = "soft_tiny_fudan"
"""The model of the paper's ablations."""

NOTES = """\
G multiply-adds are those of one image, without the inverses of the landmark matrices, as the
paper counts, and with them. nano is measured at 32 x 32. weights: what follows the model's name
for a trained one, as in softpp_nano.cifar10. Where these figures differ from the paper's, and why:
docs/backbones.md."""


def models(out: Path | None = None) -> Row:
    """List every backbone: parameters and multiply-adds, beside the paper's figures.

    Prints the table that comes with this package. With --out, counts again, which takes minutes,
    and writes JSON, CSV and Markdown.

    Args:
        out: Folder for models.json, models.csv and models.md; printed only if not given.
    """
    if out is not None:
        return publish(out / "models", counted(), page)
    content = read(next(filter(Path.is_file, COUNTED)))
    print(page(content).printed())
    return content


def counted() -> Row:
    """Builds every variant and counts its parameters and multiply-adds."""
    from tqdm import tqdm

    from ...environment import command_line

    variants = tqdm(_variants(), desc="models", unit="model", leave=False)
    return result(command_line(), [_row(*variant) for variant in variants])


def _variants() -> list[tuple[str, dict[str, Any], Row]]:
    """Names and arguments, with the paper's row where there is one."""
    import timm

    from ...models import variants as variants  # registers ours

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
    import timm

    from ...layers.attention import SoftmaxFreeAttention
    from ...models.cost import cost

    model = timm.create_model(name, **arguments)
    found = cost(model, *model.default_cfg["input_size"])
    attentions = (x for x in model.modules() if isinstance(x, SoftmaxFreeAttention))
    (inverse,) = {None if x.middle == "sums" else x.inverse for x in attentions}
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
        Column("weights", _tags),
        Column("params M", "parameters", 2, 1e6),
        Column("paper", "paper_parameters_m"),
        Column("G mult-adds", lambda x: x["multiply_adds"] - x["inverse_multiply_adds"], 3, 1e9),
        Column("+ inverse", "multiply_adds", 3, 1e9),
        Column("paper", "paper_multiply_adds_g"),
    )
    return Page("Models", [table, NOTES])


def _tags(row: Row) -> str:
    """The trained weights of a model that are in this installation, such as cifar10."""
    files = [] if row["arguments"] else (PACKAGE / "weights").glob(f"{row['model']}.*.safetensors")
    return ", ".join(sorted(path.name.split(".")[1] for path in files))


def _title(row: Row) -> str:
    return " ".join([row["model"], *(f"{k}={v}" for k, v in row["arguments"].items())])
