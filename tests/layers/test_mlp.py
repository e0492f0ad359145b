"""The feed-forward network in tiles is timm's, for everybody who looks."""

from functools import partial

import pytest
import timm.layers
import torch
from torch import Tensor, nn

from softmaxfree.layers import mlp
from softmaxfree.layers.activations import TanhGELU
from softmaxfree.layers.mlp import Mlp


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "_TILE_BYTES", 1)
    monkeypatch.setattr(mlp, "_TILE_TOKENS", 5)


def pair(act_layer: type[nn.Module] = nn.GELU) -> tuple[Mlp, timm.layers.Mlp]:
    torch.manual_seed(0)
    ours, timms = Mlp(6, 24, act_layer=act_layer), timm.layers.Mlp(6, 24, act_layer=act_layer)
    timms.load_state_dict(ours.state_dict())
    return ours.double(), timms.double()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    out = model(x)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [out.detach(), *torch.autograd.grad(out.pow(3).sum(), leaves)]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "act_layer", [nn.GELU, TanhGELU, partial(nn.GELU, approximate="tanh"), nn.ReLU]
)
@pytest.mark.parametrize("shape", [(1, 6), (5, 6), (2, 8, 6), (3, 1, 4, 6)])
def test_result_and_gradients_are_timms(act_layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    ours, timms = pair(act_layer)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(gradients(ours, x), gradients(timms, x))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), timms(x))


@pytest.mark.usefixtures("small_tiles")
def test_frozen_weights_and_second_derivatives() -> None:
    ours, timms = pair()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(ours, x)
    for model in (ours, timms):
        model.requires_grad_(False)
    torch.testing.assert_close(gradients(ours, x), gradients(timms, x))


@pytest.mark.usefixtures("small_tiles")
def test_tokens_that_are_no_leaves_and_lie_elsewhere() -> None:
    ours, timms = pair()
    wide = torch.randn(2, 6, 9, dtype=torch.float64)
    torch.testing.assert_close(ours(wide.mT), timms(wide.mT))


@pytest.mark.parametrize("part", ["fc1", "act", "fc2"])
def test_hooks_are_called(part: str) -> None:
    ours, _ = pair()
    seen: list[torch.Size] = []
    getattr(ours, part).register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    ours(torch.randn(4, 6, dtype=torch.float64))
    assert seen == [torch.Size([4, 6 if part == "fc2" else 24])]


@pytest.mark.parametrize("part", ["fc1", "act", "fc2"])
def test_a_forward_of_a_layer_s_own_is_called(part: str) -> None:
    """As libraries that patch instances give it to them."""
    ours, _ = pair()
    layer = getattr(ours, part)
    layer.forward = lambda x, plain=layer.forward: 2 * plain(x)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x), ours.fc2(ours.act(ours.fc1(x))))


def test_hooks_on_all_modules_are_called() -> None:
    ours, _ = pair()
    seen: list[nn.Module] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, out: seen.append(module)
    )
    try:
        ours(torch.randn(4, 6, dtype=torch.float64))
    finally:
        hook.remove()
    assert ours.fc1 in seen
    assert ours.fc2 in seen


def test_dropout_stays_dropout() -> None:
    torch.manual_seed(0)
    ours = Mlp(6, 24, drop=0.5)
    x = torch.randn(50, 6)
    assert (ours(x) == 0).any()
    ours.eval()
    assert not (ours(x) == 0).any()


def test_a_layer_put_in_another_s_place_is_used() -> None:
    ours, _ = pair()
    ours.fc1 = nn.Sequential(ours.fc1, nn.Tanh()).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x), ours.fc2(ours.act(ours.fc1(x))))


def test_transforms_and_other_types() -> None:
    ours, timms = pair()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(ours)(x), timms(x))
    grads = torch.func.grad(lambda x: ours(x).square().sum())(x)
    torch.testing.assert_close(grads, torch.func.grad(lambda x: timms(x).square().sum())(x))
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), timms(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.float()(x.float()).dtype == torch.bfloat16
    assert ours.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_training_keeps_the_hidden_layer_once() -> None:
    def kept(model: nn.Module) -> int:
        own = {parameter.data_ptr() for parameter in model.parameters()}
        total: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                total[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            out = model(torch.randn(100, 6, dtype=torch.float64))
        del out
        return sum(total.values())

    ours, timms = pair()
    assert kept(timms) - kept(ours) == 100 * 24 * 8
