"""Parity with the authors' released code, whole models: logits, stages, gradients, training."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import softmaxfree  # noqa: F401 - registers the models
from softmaxfree.models.checkpoints import rename_released
from softmaxfree.models.convert import convert

from ..conftest import SELECTION, SHARED, Golden, load_golden
from ..golden.selection import select
from ..helpers import relative_error
from ..released import assert_close

pytestmark = pytest.mark.usefixtures("released_backtrack")
MINI = {
    "embed_dims": (16, 32, 40, 64),
    "num_heads": (2, 4, 5, 8),
    "depths": (1, 2, 2, 1),
    "num_classes": 10,
}
NAMES = {"soft_mini": "soft_tiny_fudan", "soft_norm_mini": "softpp_tiny_fudan"}
KINDS = pytest.mark.parametrize("kind", NAMES)
PRECISIONS = pytest.mark.parametrize("precision", ["f64", "f32"])


def build(kind: str, golden: Golden, folder: Path, **arguments: object) -> nn.Module:
    """The model, by keyword arguments, its weights from a file as the authors write it."""
    state = golden.below("state/")
    averaged = {f"module.{key}": tensor for key, tensor in state.items()}
    raw = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    path = folder / "checkpoint.pth"
    torch.save({"epoch": 299, "state_dict": raw, "state_dict_ema": averaged}, path)
    if kind == "soft_norm_mini":
        arguments = {"inverse": "released_backtrack", **arguments}
    return timm.create_model(
        NAMES[kind], **MINI, **arguments, dtype=golden.dtype, checkpoint_path=path
    ).eval()


def images(size: str, golden: Golden) -> Tensor:
    inputs = load_file(SHARED / "golden" / "inputs_f32.safetensors")
    return inputs[f"in/{size}"].to(golden.dtype)


@KINDS
def test_logits_from_stage_3_on(kind: str) -> None:
    """Of the tensors that every clone has: SOFT blocks, class token, resized positions, head."""
    selected = load_file(SELECTION / "soft_mini.safetensors")
    selected |= load_file(SELECTION / f"{kind}.safetensors")
    golden = Golden(selected, torch.float64)
    inverse = {"inverse": "released_backtrack"} if kind == "soft_norm_mini" else {}
    model = timm.create_model(NAMES[kind], **MINI, **inverse, dtype=torch.float64).eval()
    missing, unexpected = model.load_state_dict(
        rename_released(golden.below("state/")), strict=False
    )
    assert not unexpected
    assert all(name.startswith(("stages.0.", "stages.1.")) for name in missing)
    with torch.no_grad():
        x, size = model.stages[2](selected["out/256x192/stage2"])
        x, _ = model.stages[3](model.stages[2].to_map(x, size))
        logits = model.forward_head(model.norm(x))
    assert_close(logits, selected["out/256x192/logits"], golden)


def test_the_selection_is_of_the_full_set() -> None:
    if not (SHARED / "golden").exists():
        pytest.skip("the full set of golden tensors is not beside this clone, in ../shared")
    sizes = 0
    for name, tensors in select(SHARED / "golden").items():
        file = SELECTION / f"{name}.safetensors"
        stored = load_file(file)
        assert stored.keys() == tensors.keys()
        assert all(torch.equal(stored[key], tensors[key]) for key in stored)
        sizes += file.stat().st_size
    assert sizes <= 2e6


@KINDS
@PRECISIONS
@pytest.mark.parametrize("size", ["224x224", "256x192"])
def test_logits(kind: str, precision: str, size: str, tmp_path: Path) -> None:
    golden = load_golden(kind, precision)
    model, x = build(kind, golden, tmp_path), images(size, golden)
    with torch.no_grad():
        assert_close(model(x), golden.tensors[f"out/{size}/logits"], golden, f32=1e-4)


def test_batch_mates_matter_in_the_release_and_not_here(tmp_path: Path) -> None:
    """It takes one step size for a batch, `backtrack` one for each matrix."""
    golden = load_golden("soft_norm_mini", "f64")
    x = images("224x224", golden)
    with torch.no_grad():
        for inverse, depends in (("released_backtrack", True), ("backtrack", False)):
            model = build("soft_norm_mini", golden, tmp_path, inverse=inverse)
            alone = torch.cat([model(image) for image in x.split(1)])
            assert (relative_error(model(x), alone) > 1e-5) == depends
            assert (relative_error(model(x), alone) < 1e-12) != depends


@KINDS
@pytest.mark.parametrize("size", ["224x224", "256x192"])
def test_stages(kind: str, size: str, tmp_path: Path) -> None:
    golden = load_golden(kind, "f64")
    model, x = build(kind, golden, tmp_path), images(size, golden)
    with torch.no_grad():
        maps = model.forward_intermediates(x, intermediates_only=True)
        tokens = model.forward_tokens(model.check(x))
    stored = golden.below(f"out/{size}/")
    for i in range(3):
        if f"stage{i + 1}" in stored:
            assert_close(maps[i], stored[f"stage{i + 1}"], golden)
    assert_close(tokens, stored["stage4_tokens"], golden)
    assert_close(maps[3].flatten(2).mT, stored["stage4_tokens"][:, 1:], golden)


@KINDS
def test_gradients(kind: str, tmp_path: Path) -> None:
    golden = load_golden(kind, "f64")
    model, x = build(kind, golden, tmp_path), images("224x224", golden).requires_grad_()
    expected = golden.below("grad/")
    model(x).backward(expected.pop("cotangent"))
    assert_close(x.grad, expected.pop("in_224"), golden)
    expected = rename_released(expected)
    parameters = dict(model.named_parameters())
    assert set(expected) == set(parameters)
    for name, parameter in parameters.items():
        assert_close(parameter.grad, expected[name], golden)


@KINDS
@PRECISIONS
def test_training_mode(kind: str, precision: str, tmp_path: Path) -> None:
    """Logits with the batch's own statistics, and the running ones after the step."""
    golden = load_golden(kind, precision)
    model, x = build(kind, golden, tmp_path).train(), images("224x224", golden)
    assert_close(model(x), golden.tensors["out/224x224/logits_trainmode"], golden, f32=1e-4)
    buffers = rename_released(golden.below("after_train_step_buffers/"))
    assert set(buffers) == set(dict(model.named_buffers()))
    for name, buffer in model.named_buffers():
        assert_close(buffer, buffers[name], golden, f32=1e-4)


@KINDS
def test_the_converted_file_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    golden = load_golden(kind, "f32")
    model, x = build(kind, golden, tmp_path), images("256x192", golden)
    target = tmp_path / "converted.safetensors"
    attention = "soft" if kind == "soft_mini" else "softpp"
    found = convert(tmp_path / "checkpoint.pth", target, attention)
    assert found.released
    assert found.variant is None
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    words: dict[str, object] = {"timm": timm}
    other = eval(found.call(attention, target), words).eval()
    for module in other.modules():
        if getattr(module, "inverse", None) == "backtrack":
            module.inverse = "released_backtrack"
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
