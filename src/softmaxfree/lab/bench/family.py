"""`softmaxfree models`: every variant, its size and its cost, beside the paper's figures."""

from pathlib import Path
from typing import Any

from ..paper import BACKBONES, LANDMARKS, SAMPLERS, Row
from ..results import Page, Table, number, publish, read, result

PACKAGE = Path(__file__).parents[2]

COUNTED = [folder / "results/models.json" for folder in (PACKAGE, PACKAGE.parents[1])]
"""The committed figures: in an installed package, and in a working copy."""
ABLATED = "soft_tiny_fudan"
"""The model of the paper's ablations."""

NOTES = """\
G multiply-adds are those of one image, without the inverses of the landmark matrices, as the
paper counts, and with them. `auto` inverts by a Cholesky factorisation; the 20 Newton steps of
`damped` and `backtrack`, with which the released weights were trained, cost eighty times as much.

weights: what follows the model's name for a trained one, as in softpp_nano.cifar10.

small, medium, large: the journal's table with softmax-free attention in stage 4 and a stem of
  width 32 fits the paper's figures best; its "64/128/256/512-d" beside the convolutions does not.
tiny: the table's depths (2, 2, 5, 2) make 14.9 M. The 13 M and 1.9 G of the paper are those of
  the released tiny (1, 2, 3, 2): tiny_fudan.
fudan: as the authors' code builds them, with softmax in stage 4. Their README's 24 M and 3.3 G
  for small are of depths (1, 3, 7, 4), which the code does not build. The paper has no others.
sampler, num_landmarks: the paper's ablations, on the released tiny.
nano, vit: have no figures in the paper. nano is measured at 32 x 32. softx is not in it: SOFT++
  with what gained in short runs at equal cost.
SOFT and SOFT++ differ in nothing that is counted here but the inverse of the fudan models."""


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
    header = [
        "model", "inverse", "weights", "params M", "paper", "G mult-adds", "+ inverse", "paper"
    ]  # fmt: skip
    lines = [
        [
            " ".join([row["model"], *(f"{k}={v}" for k, v in row["arguments"].items())]),
            row["inverse"],
            "" if row["arguments"] else ", ".join(_tags(row["model"])),
            number(row["parameters"], 2, 1e6),
            _as_printed(row["paper_parameters_m"]),
            number(row["multiply_adds"] - row["inverse_multiply_adds"], 3, 1e9),
            number(row["multiply_adds"], 3, 1e9),
            _as_printed(row["paper_multiply_adds_g"]),
        ]
        for row in content["rows"]
    ]
    return Page("Models", [Table(header, lines, 3), NOTES])


def _tags(name: str) -> list[str]:
    """The trained weights of a model that are in this installation, such as cifar10."""
    files = (PACKAGE / "weights").glob(f"{name}.*.safetensors")
    return sorted(path.name.split(".")[1] for path in files)


def _as_printed(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
