"""Models as files that run without this package: ONNX and torch.export."""

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from .errors import UserError, check_size
from .files import check_folder_of, write_atomically
from .imports import Names, import_modules, needs
from .models.backbone import Backbone
from .models.build import build_model
from .models.weights import Preparation, described, find_weights

Size = tuple[int, int]
TOLERANCE = 1e-3
"""The largest error of an exported file's logits, relative to the model's largest logit.

Rounding in float32 gave 2e-4 at three times the training size; cut-off windows gave 9e-2.
"""


def export_checked(
    weights: str,
    target: Path,
    traced_size: int | None = None,
    inverse: str | None = None,
    modules: Names = None,
) -> None:
    """Export a trained classifier to ONNX or to torch.export's format.

    Batch, height and width of this package's backbones stay open, from 33 pixels on (17 for nano,
    61 for the released models, whose landmarks leave remainders out); of timm's own models the
    batch does. The file is then run, an .onnx one by onnxruntime, on photographs and digits,
    prepared as the model expects them, at their size and three others, one of them odd. It is
    written only if it computes what the model computes. Takes one to five minutes.

    Args:
        weights: Trained weights: softpp_nano.cifar10, a run's folder or checkpoint, a file
            (docs/weights.md). Or the name of a model, such as softpp_tiny, for random weights.
        target: The .onnx or .pt2 file to write.
        traced_size: Side of the image that the model is traced with; its own if not given.
        inverse: How the landmark matrix is inverted; as in training if not given.
        modules: Python modules to import first, which register attentions of your own.
    """
    import_modules(modules)
    _check_suffix(target)
    check_folder_of(target)
    check_size(traced_size, "--traced_size")
    model, images = _open(weights, {} if inverse is None else {"inverse": inverse})
    side = traced_size or images.size
    sizes = [(side, side)]
    if isinstance(model, Backbone):
        sizes += [(side + 32, side), (side, side * 3 // 2), (side + 17, side + 43)]
    batches = [_real_images(images, size, _channels(model)) for size in sizes]
    print(f"exporting {weights} ...", flush=True)
    checked = target.with_name(f".{target.name}.unchecked{target.suffix}")
    try:
        export(model, checked, (side, side + 16) if isinstance(model, Backbone) else (side, side))
        for (height, width), found in zip(sizes, compare(model, checked, batches)):
            print(
                f"  {height} x {width}: {found.error:.1e} of the largest logit from the model, "
                f"{'the same' if found.same_class else 'another'} class for each image"
            )
            if not (found.error <= TOLERANCE and found.same_class):
                raise RuntimeError(
                    f"the exported graph does not compute what {weights} computes; {target} is not "
                    "written"
                )
        checked.replace(target)
    finally:
        checked.unlink(missing_ok=True)
    print(f"written: {target}, {target.stat().st_size / 1e6:.1f} MB")
    if alike(model, batches[0]):
        print("  with these weights all images have nearly the same logits: the check says little")


def _open(source: str, options: dict[str, Any]) -> tuple[nn.Module, Preparation]:
    """A model with its weights, or with random ones, and how its images are prepared."""
    if "." in source or not timm.is_model(source):
        weights = find_weights(source)
        return weights.build(**options), weights.preparation
    print(f"{source} has no trained weights: random ones are exported")
    cfg = timm.get_pretrained_cfg(source)
    assert cfg is not None
    weights = described(source, {}, source, cfg.to_dict(), None)
    return build_model(*weights.config(**options)).eval(), weights.preparation


def _channels(model: nn.Module) -> int:
    return model.in_chans if isinstance(model, Backbone) else 3


def _real_images(preparation: Preparation, size: Size, channels: int) -> Tensor:
    """(4, channels, height, width): two photographs and two digits, prepared for a model."""
    with needs("export", "the check of an exported file"):
        from sklearn.datasets import load_digits, load_sample_images
    digits = load_digits(n_class=2).images[:2] * (255 / 16)
    pictures = [*load_sample_images()["images"], *digits.astype("uint8")]
    transform: Any = create_transform(
        (3, *size), mean=preparation.mean, std=preparation.std,
        crop_pct=preparation.crop_pct, interpolation=preparation.interpolation,
    )  # fmt: skip
    images = torch.stack([transform(Image.fromarray(x).convert("RGB")) for x in pictures])
    return images if channels == 3 else images[:, :1].repeat(1, channels, 1, 1)


def export(model: nn.Module, path: Path, size: Size) -> None:
    """Writes a model as .onnx or .pt2, with the batch, and of a `Backbone` the size, left open.

    Args:
        model: Takes images (B, channels, H, W); it is exported in evaluation mode.
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


def graph(model: nn.Module, size: Size) -> torch.export.ExportedProgram:
    """The model's graph in evaluation mode, with the batch, and of a `Backbone` the size, open."""
    images = torch.randn(2, _channels(model), *size)
    open_axes = (0, 2, 3) if isinstance(model, Backbone) else (0,)
    shapes = (dict.fromkeys(open_axes, torch.export.Dim.DYNAMIC),)
    with torch.no_grad():
        return torch.export.export(model.eval(), (images,), dynamic_shapes=shapes)


class Comparison(NamedTuple):
    """How far an exported file is from its model on a batch."""

    error: float
    """Of the logits, relative to the model's largest one."""
    same_class: bool
    """Whether the most probable class is the same for every image."""


def compare(model: nn.Module, path: Path, batches: Sequence[Tensor]) -> list[Comparison]:
    """Compares an exported file with its model on batches of images (B, channels, H, W)."""
    run, found = open_exported(path), []
    for images in batches:
        with torch.no_grad():
            expected = model.eval()(images)
        logits = run(images)
        error = ((logits - expected).abs().max() / expected.abs().max()).item()
        found.append(Comparison(error, torch.equal(logits.argmax(1), expected.argmax(1))))
    return found


@torch.no_grad()
def alike(model: nn.Module, images: Tensor) -> bool:
    """Whether the logits of all images agree within ten times the tolerance."""
    logits = model.eval()(images)
    return bool((logits - logits[:1]).abs().max() < 10 * TOLERANCE * logits.abs().max())


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


def _refuse_what_onnx_lacks(model: nn.Module) -> None:
    for module in model.modules():
        method: Any = getattr(module, "inverse", None)
        if method in ("cholesky", "exact"):
            raise UserError(
                f"ONNX has no operator for inverse={method!r}; build the model with "
                "inverse='auto', which gives the same result by matrix products"
            )
