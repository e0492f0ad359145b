"""Recording: what it sees, and that nothing of it stays behind."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from softmaxfree import SoftmaxFreeAttention, attention_rows, diagnose, recorded_attention
from softmaxfree.layers.registry import build_attention

from ..helpers import relative_error, tokens

LAYERS = [
    "stages.0.blocks.0.attention",
    "stages.1.blocks.0.attention",
    "stages.2.blocks.0.attention",
    "stages.2.blocks.1.attention",
    "stages.3.blocks.0.attention",
]


def nano(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("softpp_nano", **options)


def state(model: nn.Module) -> list[Any]:
    """All that could be left behind, but for the tensors' values."""
    attributes = [
        (name, key, value if isinstance(value, bool) else id(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    ]
    hooks = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    parameters = [(id(p), p._version, p.requires_grad, p.grad) for p in model.parameters()]
    buffers = [(id(b), b._version) for b in model.buffers()]
    return [attributes, hooks, parameters, buffers, torch.get_rng_state().tolist()]


def fail(model: nn.Module, images: Tensor) -> None:
    with pytest.raises(ValueError, match="channels"), recorded_attention(model):
        model(images[:, :1])


def rows(model: nn.Module, images: Tensor) -> None:
    attention_rows(model, images[0], (0, 0), -1)


def refused_rows(model: nn.Module, images: Tensor) -> None:
    with pytest.raises(ValueError, match="grid"):
        attention_rows(model, images[0], (99, 0), -1)


@pytest.mark.filterwarnings("ignore:.*switched off")
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize(
    ("attention", "use"),
    [
        ("softpp", fail),
        ("softpp", rows),
        ("softpp", refused_rows),
        ("softpp", diagnose),
        ("softx", diagnose),
        ("performer", rows),
    ],
)
def test_the_model_is_left_as_it_was(
    attention: str, use: Callable[[nn.Module, Tensor], Any], training: bool
) -> None:
    model = nano(attention=attention).train(training)
    before = state(model)
    use(model, tokens(1, 3, 32, 32, dtype=torch.float32))
    assert state(model) == before


def test_layers_come_in_the_order_in_which_they_ran() -> None:
    model, images = nano().eval(), tokens(2, 3, 24, 32, dtype=torch.float32)
    before = state(model)
    with recorded_attention(model) as layers:
        assert not layers
        model(images[:1, :, :16])
        model(images)
    assert state(model) == before
    assert list(layers) == LAYERS
    first = layers[LAYERS[0]]
    assert first.attention is model.get_submodule(LAYERS[0])
    assert first.q.shape == (2, 2, 12 * 16, 16)  # of the last pass
    assert first.k is first.q
    assert first.layout.size == (12, 16)
    assert not first.q.requires_grad


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("normalize", [True, False], ids=["softpp", "soft"])
def test_factors_give_what_the_layer_gives(normalize: bool, tied: bool) -> None:
    torch.manual_seed(0)
    layer = SoftmaxFreeAttention(12, 2, ratio=2, normalize=normalize, tie_qk=tied).double().eval()
    x = tokens(2, 6 * 5, 12)
    with recorded_attention(layer) as layers:
        out = layer(x, (6, 5))
    record = layers[""]
    factors = record.factors()
    m = 9 if tied else 18
    assert factors.P.shape == factors.P_keys.shape == (2, 2, 30, m)
    assert (factors.P_keys is factors.P) == tied
    assert factors.A is not None
    assert factors.A_inverse is not None
    assert factors.A.shape == factors.A_inverse.shape == (2, 2, m, m)
    identity = torch.eye(m, dtype=torch.float64)
    assert (
        relative_error(
            (factors.A + 0.01 * identity) @ factors.A_inverse, identity.expand_as(factors.A)
        )
        < 1e-9
    )
    if normalize:
        assert factors.D is not None
        assert torch.equal(factors.D, factors.A.sum(-1))
        root = torch.diag_embed(factors.D**-0.5)
        assert relative_error(factors.Z, root @ factors.A_inverse @ root) < 1e-12
    else:
        assert factors.D is None
        assert torch.equal(factors.Z, factors.A_inverse)
    heads = factors.attend(record.v).transpose(1, 2).flatten(2)
    assert relative_error(layer.proj(heads), out) < 1e-9


def test_threads_see_their_own_passes() -> None:
    model = nano().eval()
    images = [tokens(1, 3, 32, 32, seed=seed, dtype=torch.float32) for seed in range(3)]
    everyone = threading.Barrier(3)
    found: list[Any] = [None] * 3

    def look(i: int) -> None:
        with torch.no_grad(), recorded_attention(model) as layers:
            everyone.wait()
            model(images[i])
            everyone.wait()
        found[i] = layers

    def only_use() -> None:
        everyone.wait()
        with torch.no_grad():
            model(images[2])
        everyone.wait()

    before = state(model)
    threads = [threading.Thread(target=look, args=(i,)) for i in range(2)]
    threads.append(threading.Thread(target=only_use))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state(model) == before
    for i in range(2):
        with torch.no_grad(), recorded_attention(model) as alone:
            model(images[i])
        assert list(found[i]) == LAYERS
        for name, record in alone.items():
            assert torch.equal(found[i][name].q, record.q)


def test_recordings_of_a_part_and_of_the_whole() -> None:
    model = nano().eval()
    stage: Any = model.get_submodule("stages.2")
    before = state(model)
    with torch.no_grad(), recorded_attention(model) as whole:
        with recorded_attention(stage) as part:
            model(torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
        rows = part["blocks.1.attention"].rows_by_gradient([0])  # is not recorded
    assert state(model) == before
    assert list(whole) == LAYERS
    assert list(part) == ["blocks.0.attention", "blocks.1.attention"]
    assert torch.equal(whole["stages.2.blocks.1.attention"].v, part["blocks.1.attention"].v)
    assert rows.shape == (1, 8, 1, 16)


def test_an_attend_of_ones_own_is_put_back() -> None:
    layer = SoftmaxFreeAttention(12, 2, ratio=2).eval()
    own = vars(layer)["attend"] = lambda q, k, v, layout: 2 * v
    with recorded_attention(layer) as layers:
        layer(torch.randn(1, 16, 12), (4, 4))
    assert layer.attend is own
    assert torch.equal(layers[""].rows_by_gradient([3])[0, 0, 0], 2.0 * (torch.arange(16) == 3))


@pytest.mark.parametrize("name", ["softpp", "linformer"])
def test_passes_in_inference_mode_and_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    layer = build_attention(name, 24, 3, ratio=2, max_size=(4, 4)).eval()
    x = tokens(1, 16, 24, dtype=torch.float32)
    mask = torch.arange(16).expand(1, -1) < 14
    with recorded_attention(layer) as layers:
        layer(x, (4, 4), mask=mask)
    expected = layers[""].rows([3])
    with torch.inference_mode(), recorded_attention(layer) as layers:
        layer(x.clone(), (4, 4), mask=mask.clone())
        assert torch.equal(layers[""].rows([3]), expected)
    assert torch.equal(layers[""].rows([3]), expected)
    with torch.autocast("cpu", torch.bfloat16), recorded_attention(layer) as layers:
        layer(x, (4, 4), mask=mask)
        assert relative_error(layers[""].rows([3]), expected) < 0.05
    assert relative_error(layers[""].rows([3]), expected) < 0.05


def test_layers_in_training_are_refused() -> None:
    layer = build_attention("performer", 24, 3, redraw=1)
    x = torch.randn(1, 16, 24)
    for before, after in ((True, True), (True, False), (False, True)):
        with recorded_attention(layer.train(before)) as layers:
            layer(x, (4, 4))
        layer.train(after)
        with pytest.raises(ValueError, match="training mode"):
            layers[""].rows([0])
