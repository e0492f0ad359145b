"""Models as files that run without this package: ONNX and torch.export, for images of any size."""

import contextlib
import difflib
import io
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from .errors import UserError
from .files import write_atomically
from .imports import Names, import_modules, needs
from .models.backbone import Backbone
from .models.checkpoints import read_checkpoint

Size = tuple[int, int]
TOLERANCE = 1e-3
"""The largest error of an exported file's logits, relative to the model's largest logit.

Rounding in float32 gave 2e-4 at three times the training size; cut-off windows gave 9e-2.
"""


def export_checked(
    model: str,
    target: Path,
    checkpoint: Path | None = None,
    num_classes: int | None = None,
    traced_size: int | None = None,
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
        target: The .onnx or .pt2 file to write.
        checkpoint: Checkpoint with the weights, .pth or .safetensors; random ones if not given.
        num_classes: Width of the logits; the model's default if not given.
        traced_size: Side of the image that the model is traced with; its own if not given.
        inverse: How the landmark matrix is inverted; the model's own way if not given. Weights
            need the one that they were trained with.
        attention: Attention to use in the backbone; its own if not given.
        modules: Python modules to import first, which register attentions of your own.
    """
    import_modules(modules)
    _check_suffix(target)
    names = timm.list_models("soft*")
    if model not in names:
        close = difflib.get_close_matches(model, names) or ["softpp_tiny"]
        raise UserError(
            f"there is no backbone {model!r}; did you mean {' or '.join(close)}? "
            "`softmaxfree models` lists them"
        )
    built = timm.create_model(model, num_classes=num_classes, inverse=inverse, attention=attention)
    if checkpoint is not None:
        built.load_state_dict(read_checkpoint(checkpoint))
    side = traced_size or built.default_cfg["input_size"][-1]
    sizes = [(side + 32, side), (side, side * 3 // 2), (side + 17, side + 43)]
    print(f"exporting {model} ...", flush=True)
    checked = target.with_name(f".{target.name}.unchecked{target.suffix}")
    try:
        export(built, checked, (side, side + 16))
        for (height, width), error in compare(built, checked, sizes).items():
            print(f"  {height} x {width}: {error:.1e} of the largest logit from the model")
            if not error <= TOLERANCE:
                raise RuntimeError(
                    f"the exported graph does not compute what {model} computes; {target} is not "
                    "written"
                )
        checked.replace(target)
    finally:
        checked.unlink(missing_ok=True)
    print(f"written: {target}, {target.stat().st_size / 1e6:.1f} MB")
    if alike(built, sizes[0]):
        print("  with these weights all images have nearly the same logits: the check says little")


def export(model: Backbone, path: Path, size: Size) -> None:
    """Writes a model as .onnx or .pt2, with batch, height and width left open.

    Args:
        model: Takes images (B, in_chans, H, W); it is exported in evaluation mode.
        path: Its suffix chooses the format.
        size: (height, width) of the image that the model is traced with.
    """
    _check_suffix(path)
    if path.suffix == ".onnx":
        _need_onnx()
        _refuse_what_onnx_lacks(model)
    buffer = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters' warnings about themselves
        program = graph(model, size)
        if path.suffix == ".pt2":
            torch.export.save(program, buffer)
        else:
            onnx = torch.onnx.export(
                program, dynamo=True, input_names=["images"], output_names=["logits"]
            )
            assert onnx is not None
            buffer.write(onnx.model_proto.SerializeToString())
    write_atomically(path, buffer.getvalue())


def graph(model: Backbone, size: Size) -> torch.export.ExportedProgram:
    """The model's graph in evaluation mode, with batch, height and width left open."""
    images = torch.randn(2, model.in_chans, *size)
    shapes = {"x": dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)}
    with torch.no_grad():
        return torch.export.export(model.eval(), (images,), dynamic_shapes=shapes)


def compare(model: Backbone, path: Path, sizes: Sequence[Size]) -> dict[Size, float]:
    """The error of the exported file, relative to the model's largest logit, by image size."""
    run = open_exported(path)
    errors = {}
    for batch, size in enumerate(sizes, start=1):
        generator = torch.Generator().manual_seed(batch)
        images = torch.randn(batch, model.in_chans, *size, generator=generator)
        with torch.no_grad():
            expected = model.eval()(images)
        errors[size] = ((run(images) - expected).abs().max() / expected.abs().max()).item()
    return errors


@torch.no_grad()
def alike(model: Backbone, size: Size) -> bool:
    """Whether the logits of two different images agree within ten times the tolerance."""
    images = torch.randn(2, model.in_chans, *size, generator=torch.Generator().manual_seed(0))
    first, second = model.eval()(images)
    return bool((first - second).abs().max() < 10 * TOLERANCE * first.abs().max())


def open_exported(path: Path) -> Callable[[Tensor], Tensor]:
    """The function of an exported file: images (B, C, H, W) -> logits."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    _need_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _check_suffix(path: Path) -> None:
    if path.suffix not in (".onnx", ".pt2"):
        raise UserError(f"the exported file must end in .onnx or .pt2, got {path}")


def _need_onnx() -> None:
    with needs("export", "ONNX"):
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_module(package)


def _refuse_what_onnx_lacks(model: Backbone) -> None:
    for module in model.modules():
        method: Any = getattr(module, "inverse", None)
        if method in ("cholesky", "exact"):
            raise UserError(
                f"ONNX has no operator for inverse={method!r}; build the model with "
                "inverse='auto', which gives the same result by matrix products"
            )
