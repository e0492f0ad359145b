"""Weights both ways, what is wrong with them, and the graph that is exported."""

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import load_file, save_file

from softmaxfree_mindspore import create_model, load_weights, save_weights
from softmaxfree_mindspore.export import export
from softmaxfree_mindspore.models.checkpoints import state_arrays

from .conftest import assert_close
from .test_vectors import DIGITS


def test_a_file_of_softmaxfree_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "back.safetensors"
    save_weights(create_model("softpp_nano", DIGITS, num_classes=10), path)
    stored = {name.removeprefix("model."): x for name, x in load_file(DIGITS).items()}
    back = load_file(path)
    assert set(back) == set(stored)
    for name, array in back.items():
        if name.endswith("num_batches_tracked"):
            assert array.dtype == np.int64
        else:
            assert np.array_equal(array, stored[name].astype(np.float32))


def exchanged(name: str) -> Path:
    path = Path(__file__).parents[1] / "build" / "exchange" / name
    if not path.exists():
        pytest.skip("torch's files are not there; `make test-mindspore` writes them")
    return path


def test_a_released_checkpoint_by_way_of_convert(tmp_path: Path) -> None:
    """torch's logits from the converted file, which comes back bit for bit, counters included."""
    file, there = (
        exchanged("soft_tiny_fudan.safetensors"),
        load_file(exchanged("logits.safetensors")),
    )
    model = create_model("soft_tiny_fudan", file)
    assert_close(model(Tensor(there["images"])), there["logits"], 1e-4)
    save_weights(model, tmp_path / "back.safetensors")
    stored, back = load_file(file), load_file(tmp_path / "back.safetensors")
    assert set(stored) == set(back)
    assert all(np.array_equal(array, back[name]) for name, array in stored.items())


def test_a_file_for_torch() -> None:
    """What exchange.py loads there."""
    folder = exchanged("logits.safetensors").parent
    ms.set_seed(1)
    model = create_model("softx_nano", num_classes=10)
    images = np.random.RandomState(0).standard_normal((2, 3, 40, 32)).astype(np.float32)
    logits = model(Tensor(images)).asnumpy()
    save_weights(model, folder / "from_mindspore.safetensors")
    save_file({"images": images, "logits": logits}, folder / "logits_from_mindspore.safetensors")


def test_weights_of_another_image_size_are_resized(tmp_path: Path) -> None:
    save_weights(create_model("soft_nano"), tmp_path / "w.safetensors")
    model = create_model("soft_nano", tmp_path / "w.safetensors", img_size=(48, 64))
    assert model.stages[0].position.grid.shape == (1, 24, 32, 32)


def test_mismatches_are_named(tmp_path: Path) -> None:
    state = state_arrays(create_model("soft_nano", num_classes=10))
    state["head.extra"] = state.pop("norm.bias")
    state["head.weight"] = state["head.weight"][:7]
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="do not fit") as caught:
        load_weights(create_model("soft_nano", num_classes=10), tmp_path / "w.safetensors")
    message = str(caught.value)
    assert (
        "missing: norm.bias; unknown: head.extra; of other shape: head.weight (7, 160)" in message
    )


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    model, path = create_model("soft_nano"), tmp_path / "w.safetensors"
    with pytest.raises(ValueError, match="there is no file"):
        load_weights(model, path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="softmaxfree convert"):
        load_weights(model, path)
    with pytest.raises(ValueError, match="must end in"):
        save_weights(model, tmp_path / "w.ckpt")


def test_names() -> None:
    with pytest.raises(ValueError, match="choose one of soft_nano, soft_tiny"):
        create_model("soft_gigantic")
    assert count(create_model("soft_tiny_fudan")) == 13_069_056


def count(model: nn.Cell) -> int:
    return sum(parameter.size for parameter in model.trainable_params())


def test_exported_graph(tmp_path: Path) -> None:
    model = create_model("softpp_nano", depths=(1, 1, 1, 1), num_classes=10)
    export(model, tmp_path / "nano.mindir", (32, 40), batch=2)
    graph = nn.GraphCell(ms.load(str(tmp_path / "nano.mindir")))
    images = Tensor(np.random.RandomState(0).standard_normal((2, 3, 32, 40)).astype(np.float32))
    assert_close(graph(images), model(images).asnumpy(), 1e-5)
