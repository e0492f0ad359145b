"""Patch embeddings: a convolution as one product is that convolution."""

import pytest
import torch
from timm.layers import ConvNormAct

from softmaxfree.layers.patches import EmbeddingConv


@pytest.mark.parametrize("size", [(4, 4), (5, 3), (1, 2), (14, 14)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_it_is_timms_layer(size: tuple[int, int], stride: int, training: bool) -> None:
    """The largest map has more places than channels and is convolved, all others multiplied."""
    torch.manual_seed(0)
    ours = EmbeddingConv(40, 12, 3, stride=stride, bias=True).double().train(training)
    timms = ConvNormAct(40, 12, 3, stride=stride, bias=True).double().train(training)
    timms.load_state_dict(ours.state_dict())
    x = torch.randn(2, 40, *size, dtype=torch.float64, requires_grad=True)
    results = []
    for model in (ours, timms):
        out = model(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])])
    torch.testing.assert_close(*results)


def test_hooks_of_the_convolution_are_called() -> None:
    layer = EmbeddingConv(40, 12, 3, stride=2, bias=True)
    seen: list[torch.Size] = []
    layer.conv.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    layer(torch.randn(1, 40, 4, 4))
    assert seen == [torch.Size([1, 12, 2, 2])]
