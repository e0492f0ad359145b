"""Parity with the authors' released code, whole models: logits, gradients, training."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from softmaxfree_mindspore import SoftmaxFreeTransformer, create_model
from softmaxfree_mindspore.models.checkpoints import load_arrays, state_arrays, torch_name
from softmaxfree_mindspore.ops.inverse import INVERSES

from .conftest import Arrays, assert_close, below, in_modes, load_golden
from .released import ReleasedBacktrack, renamed

MINI = {
    "embed_dims": (16, 32, 40, 64),
    "num_heads": (2, 4, 5, 8),
    "depths": (1, 2, 2, 1),
    "num_classes": 10,
}
KINDS = pytest.mark.parametrize("kind", ["soft_mini", "soft_norm_mini"])


@pytest.fixture(autouse=True)
def _released_backtrack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INVERSES, "released_backtrack", ReleasedBacktrack)


def build(kind: str, golden: Arrays) -> SoftmaxFreeTransformer:
    if kind == "soft_mini":
        model = create_model("soft_tiny_fudan", **MINI)
    else:
        model = create_model("softpp_tiny_fudan", inverse="released_backtrack", **MINI)
    load_arrays(model, renamed(below(golden, "state/")))
    return model


def images(size: str) -> Tensor:
    return Tensor(load_golden("inputs_f32")[f"in/{size}"])


@KINDS
@in_modes("size", [("224x224", "pynative"), ("256x192", "graph")])
def test_logits(kind: str, size: str, mode: None) -> None:
    golden = load_golden(f"{kind}_f32")
    logits = build(kind, golden)(images(size))
    assert_close(logits, golden[f"out/{size}/logits"], 1e-4)


@KINDS
def test_gradients(kind: str) -> None:
    golden = load_golden(f"{kind}_f32")
    model, x = build(kind, golden), images("224x224")
    expected = below(golden, "grad/")
    cotangent = Tensor(expected.pop("cotangent"))
    named = {torch_name(name): p for name, p in model.parameters_and_names() if p.requires_grad}

    def loss(x: Tensor) -> Tensor:
        return (model(x) * cotangent).sum()

    of_images, learned = ms.grad(loss, 0, list(named.values()))(x)
    in_float64 = load_golden(f"{kind}_f64")["grad/in_224"]  # stored in that file alone
    assert_close(of_images, in_float64, 1e-3)
    expected = renamed(expected)
    assert set(expected) == set(named)
    for name, gradient in zip(named, learned, strict=True):
        assert_close(gradient, expected[name], 1e-3)


@KINDS
def test_training_mode(kind: str) -> None:
    """Logits with the batch's own statistics, and the running ones after the step."""
    golden = load_golden(f"{kind}_f32")
    model = build(kind, golden).set_train()
    logits = model(images("224x224"))
    assert_close(logits, golden["out/224x224/logits_trainmode"], 1e-4)
    after = state_arrays(model)
    for name, array in renamed(below(golden, "after_train_step_buffers/")).items():
        if not name.endswith("num_batches_tracked"):
            assert_close(after[name], array, 1e-4)


def test_batch_mates_do_not_matter() -> None:
    """The release takes one step size for a batch, `backtrack` one for each matrix."""
    golden = load_golden("soft_norm_mini_f32")
    model = create_model("softpp_tiny_fudan", **MINI)
    load_arrays(model, renamed(below(golden, "state/")))
    x = images("224x224")
    alone = np.concatenate([model(x[i : i + 1]).asnumpy() for i in range(2)])
    assert_close(model(x), alone, 1e-4)
