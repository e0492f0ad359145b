"""Commands of the library."""

from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser

from .imports import MODULES, Names, import_modules, needs


def build() -> None:
    """Compile the optional code for this machine's CPU: a few seconds, once.

    It needs g++ or clang++ and is found from then on, in the user's cache. Results are the same
    within rounding. SOFTMAXFREE_NATIVE=0 leaves it out.
    """
    from .ops.backends.native import build as compile_library

    print(f"written: {compile_library()}")


def convert(source: Path, target: Path, attention: Literal["soft", "softpp"] = "soft") -> None:
    """Turn a released checkpoint into safetensors, and say what it holds.

    Sizes and depths are read from the shapes of its weights; averaged weights (EMA) come first.
    Nothing in the file is run. timm.create_model(..., checkpoint_path=...) takes either file.

    Args:
        source: The authors' .pth file.
        target: The .safetensors file to write.
        attention: Which of the two it was trained as; the weights do not tell.
    """
    from .models.convert import convert as convert_file

    found = convert_file(source, target, attention)
    names = "the authors' names" if found.released else "this package's names"
    print(f"{source}: {found.parameters:,} parameters under {names}")
    for name, value in found.arguments.items():
        print(f"  {name}: {value}")
    known = found.variant
    print(f"  that is {attention}_{known}" if known else "  no registered variant has these sizes")
    print(f"written: {target}; load it with\n  {found.call(attention, target)}")


def export(
    model: str,
    target: Path,
    checkpoint: Path | None = None,
    num_classes: int | None = None,
    size: int | None = None,
    inverse: str | None = None,
    attention: str | None = None,
    modules: Names = None,
) -> None:
    """Export a backbone to ONNX or to torch.export's format, for images of any size.

    Batch, height and width stay open, from 33 pixels on (17 for nano, 61 for the released models,
    whose landmarks leave remainders out). The file is then run, an .onnx one by onnxruntime, at
    three other sizes, one of them odd, and compared with the model. Takes one to five minutes.

    Args:
        model: Name of a backbone, such as softpp_tiny; see `softmaxfree models`.
        target: File to write: .onnx or .pt2.
        checkpoint: Weights to load, .pth or .safetensors; random ones if not given.
        num_classes: Width of the logits; the model's default if not given.
        size: Side of the image that is traced with; the model's own if not given.
        inverse: How the landmark matrix is inverted; the model's own way if not given. Weights
            need the one that they were trained with.
        attention: Another attention in the backbone; its own if not given.
        modules: Python modules to import first, which register attentions of your own.
    """
    from .deploy import export_checked

    import_modules(modules)
    export_checked(model, target, checkpoint, num_classes, size, inverse, attention)


def predict(arguments: list[str]) -> None:
    parser = ArgumentParser(
        prog="softmaxfree predict",
        description="Say what is on images, with a run's checkpoint; draw what a detector finds.",
    )
    # Without a type: what is read as one must be in UTF-8, and names of files need not be.
    parser.add_argument("images", nargs="+", help="Files of images.")
    parser.add_argument("--ckpt", type=Path, required=True, help="A run's last.ckpt or best.ckpt.")
    parser.add_argument("--top", type=int | None, help="Classes to show for each image; 5.")
    parser.add_argument(
        "--threshold", type=float | None, help="Score from which an object is shown; 0.5."
    )
    parser.add_argument(
        "--size", type=int | None, help="Side to resize to; as in training if not given."
    )
    parser.add_argument(
        "--out", type=Path | None, help="Folder for pictures of the objects; predictions."
    )
    parser.add_argument("--json", type=Path | None, help="File to write what was found to.")
    parser.add_argument("--modules", type=Names, help=MODULES)
    given = parser.parse_args(arguments)
    with needs("train"):
        from .tasks.predict import run
    import_modules(given.modules)
    images = [Path(name) for name in given.images]
    run(images, given.ckpt, given.top, given.size, given.json, given.threshold, given.out)


def runs(arguments: list[str]) -> None:
    parser = ArgumentParser(
        prog="softmaxfree runs",
        description="Put finished training runs side by side: time, seed and scores of each.",
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, help="Folders of runs, as fit writes them."
    )
    parser.add_argument(
        "--out",
        type=Path | None,
        help="Where to write the table, without a suffix: as JSON, CSV and Markdown.",
    )
    given = parser.parse_args(arguments)
    with needs("train"):
        from .lab.bench.runs import compare_runs
    compare_runs(given.folders, given.out)


def fit(arguments: list[str]) -> None:
    """Train a model."""
    _train("fit", arguments)


def validate(arguments: list[str]) -> None:
    """Score a checkpoint on the validation split."""
    _train("validate", arguments)


def test(arguments: list[str]) -> None:
    """Score a checkpoint on the test split."""
    _train("test", arguments)


def _train(command: str, arguments: list[str]) -> None:
    with needs("train"):
        from .training.command import run
    run(command, arguments)
