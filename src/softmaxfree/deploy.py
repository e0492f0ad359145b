"""Models as files that run without this package: ONNX and torch.export, for images of any size."""

import contextlib
import difflib
import io
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from .errors import UserError
from .files import write_atomically
from .models.backbone import Backbone
from .models.checkpoints import read_checkpoint

Size = tuple[int, int]
TOLERANCE = 1e-3
"""Of an exported file's logits, relative to the model's largest.

Rounding in float32 came to 2e-4 at three times the size of training; cut-off windows to 9e-2.
"""


def export_checked(
    name: str,
    path: Path,
    checkpoint: Path | None,
    num_classes: int | None,
    side: int | None,
    inverse: str | None,
    attention: str | None,
) -> None:
    """Builds a backbone, exports it, compares the file with it at other sizes, and says so."""
    _check_suffix(path)
    names = timm.list_models("soft*")
    if name not in names:
        close = difflib.get_close_matches(name, names) or ["softpp_tiny"]
        raise UserError(
            f"there is no backbone {name!r}; did you mean {' or '.join(close)}? "
            "`softmaxfree models` lists them"
        )
    model = timm.create_model(name, num_classes=num_classes, inverse=inverse, attention=attention)
    if checkpoint is not None:
        model.load_state_dict(read_checkpoint(checkpoint))
    side = side or model.default_cfg["input_size"][-1]
    sizes = [(side + 32, side), (side, side * 3 // 2), (side + 17, side + 43)]
    print(f"exporting {name} ...", flush=True)
    checked = path.with_name(f".{path.name}.unchecked{path.suffix}")
    try:
        export(model, checked, (side, side + 16))
        for (height, width), error in compare(model, checked, sizes).items():
            print(f"  {height} x {width}: {error:.1e} of the largest logit from the model")
            if not error <= TOLERANCE:
                raise RuntimeError(
                    f"the exported graph does not compute what {name} computes; {path} is not "
                    "written"
                )
        checked.replace(path)
    finally:
        checked.unlink(missing_ok=True)
    print(f"written: {path}, {path.stat().st_size / 1e6:.1f} MB")
    if alike(model, sizes[0]):
        print("  with these weights all images have nearly the same logits: the check says little")


def export(model: Backbone, path: Path, size: Size) -> None:
    """Writes a model as .onnx or .pt2, with batch, height and width left open.

    Args:
        model: Takes images (B, in_chans, H, W); it is exported as in evaluation.
        path: Its suffix says which of the two.
        size: (height, width) of the image that the model is traced with.
    """
    _check_suffix(path)
    if path.suffix == ".onnx":
        _need_onnx()
        _refuse_what_onnx_lacks(model)
    buffer = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # of the exporters about themselves
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
    """What a model does in evaluation, with batch, height and width left open."""
    images = torch.randn(2, model.in_chans, *size)
    shapes = {"x": dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)}
    with torch.no_grad():
        return torch.export.export(model.eval(), (images,), dynamic_shapes=shapes)


def compare(model: Backbone, path: Path, sizes: Sequence[Size]) -> dict[Size, float]:
    """How far the exported model is from the model, relative to its largest logit, by size."""
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
    """Whether two different images have the same logits, but for ten times the tolerance."""
    images = torch.randn(2, model.in_chans, *size, generator=torch.Generator().manual_seed(0))
    first, second = model.eval()(images)
    return bool((first - second).abs().max() < 10 * TOLERANCE * first.abs().max())


def open_exported(path: Path) -> Callable[[Tensor], Tensor]:
    """What an exported file computes: images (B, C, H, W) -> logits."""
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
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(package) is None:
            raise UserError(
                f"ONNX needs {package}; install it with: pip install 'softmaxfree[export]'"
            )


def _refuse_what_onnx_lacks(model: Backbone) -> None:
    for module in model.modules():
        method: Any = getattr(module, "inverse", None)
        if method in ("cholesky", "exact"):
            raise UserError(
                f"ONNX has no operator for inverse={method!r}; build the model with "
                "inverse='auto', which gives the same by products alone"
            )
