"""Tests that every attention must pass, for a class to inherit.

    class TestMine(AttentionBattery):
        name = "mine"

Then pytest runs them all on the attention that is registered under that name.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .layers.multihead import Layout, MultiHeadAttention
from .layers.registry import attention_class, build_attention, chosen_options

DIM, HEADS = 24, 3


class AttentionBattery:
    """Shapes, gradients, masks, batches, precision and cost of a registered attention.

    `name` is its name in the registry, `options` are arguments of its constructor.
    """

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def build(self, ndim: int = 2, seed: int = 0, **options: Any) -> MultiHeadAttention:
        """A small layer in float64, in evaluation mode; unknown `options` are left out."""
        torch.manual_seed(seed)
        defaults = {"ratio": 3, "max_size": (16,) * ndim if ndim == 2 else (256,)}
        own = chosen_options(self.name, **self.options)
        options = defaults | own | {"ndim": ndim} | options
        return build_attention(self.name, DIM, HEADS, **options).double().eval()

    def build_both(self, ndim: int = 2, **options: Any) -> Iterator[MultiHeadAttention]:
        """The layer as it is by default and, if it can, with `tie_qk` the other way."""
        layer = self.build(ndim, **options)
        yield layer
        try:
            other = self.build(ndim, **options | {"tie_qk": not layer.tie_qk})
        except ValueError as refusal:
            if "tie_qk" not in str(refusal):
                raise
        else:
            yield other

    def test_any_grid_keeps_its_shape(self) -> None:
        for size in ((1, 1), (3, 3), (5, 7), (16, 2), (1, 16)):
            for prefix in (0, 1):
                layer = self.build(prefix_tokens=prefix, value_conv=3)
                x = _tokens(2, prefix + math.prod(size), DIM)
                out = layer(x, size)
                assert out.shape == x.shape, f"{tuple(out.shape)} for a grid of {size}"
                assert out.isfinite().all(), f"not finite for a grid of {size}"

    def test_any_sequence_keeps_its_shape(self) -> None:
        for n in (1, 2, 17, 64, 200):
            for prefix in (0, 1):
                out = self.build(1, prefix_tokens=prefix)(_tokens(2, prefix + n, DIM))
                assert out.shape == (2, prefix + n, DIM)
                assert out.isfinite().all(), f"not finite for {n} tokens"

    def test_gradients_reach_every_parameter_and_all_tokens(self) -> None:
        layer = self.build(prefix_tokens=1, value_conv=3).train()
        x = _tokens(2, 1 + 8 * 6, DIM).requires_grad_()
        layer(x, (8, 6)).square().sum().backward()
        for name, parameter in [*layer.named_parameters(), ("x", x)]:
            assert parameter.grad is not None, f"no gradient for {name}"
            assert parameter.grad.isfinite().all(), f"gradient not finite for {name}"
            assert parameter.grad.any(), f"gradient 0 for {name}"
        assert x.grad is not None
        assert x.grad.any(-1).all(), "some tokens change nothing"

    def test_gradients_are_those_of_differences(self) -> None:
        layer = self.build(1, num_landmarks=4)
        x, direction = _tokens(1, 20, DIM), _tokens(1, 20, DIM, seed=1)
        x.requires_grad_()
        cotangent = _tokens(1, 20, DIM, seed=2)
        (gradient,) = torch.autograd.grad(layer(x), x, cotangent)
        step = 1e-6
        with torch.no_grad():
            ahead, behind = layer(x + step * direction), layer(x - step * direction)
        expected = ((ahead - behind) / (2 * step) * cotangent).sum()
        got = (gradient * direction).sum()
        assert abs(got - expected) < 1e-5 * abs(expected) + 1e-7, f"{got:.8g}, not {expected:.8g}"

    def test_values_enter_linearly(self) -> None:
        """Heat maps rely on it: attention to one-hot values gives the attention matrix."""
        layer = self.build(1)
        q, k, v, w = _tokens(4, 1, HEADS, 30, DIM // HEADS).unbind()
        k = q if layer.k is None else k
        layout = Layout((30,), (30,), None, None)
        both, first, second = (layer.attend(q, k, values, layout) for values in (v + 2 * w, v, w))
        assert _error(both, first + 2 * second) < 1e-9

    def test_padding_changes_nothing(self) -> None:
        for options in ({}, {"num_landmarks": 4}, {"value_conv": 3}, {"prefix_tokens": 1}):
            for layer in self.build_both(1, **options):
                x = _tokens(2, 37, DIM)
                padded = torch.cat([x, x.new_full((2, 20, DIM), torch.nan)], 1)
                got = layer(padded, mask=(torch.arange(57) < 37).expand(2, -1))
                error = _error(got[:, :37], layer(x))
                assert error < 1e-9, f"with {options}, tie_qk={layer.tie_qk}: {error:.1e}"

    def test_padding_reaches_no_gradient(self) -> None:
        """Not even if the padding is NaN, and NaN times 0 is NaN."""
        for options in ({}, {"value_conv": 3}, {"gate": True}):
            for layer in self.build_both(1, num_landmarks=4, **options):
                x = _tokens(2, 57, DIM)
                x[:, 37:] = torch.nan
                x.requires_grad_()
                out = layer(x, mask=(torch.arange(57) < 37).expand(2, -1))
                out[:, :37].square().sum().backward()
                assert x.grad is not None
                assert not x.grad[:, 37:].any(), f"with {options}: what is dropped has a gradient"
                for name, parameter in [*layer.named_parameters(), ("x", x)]:
                    gradient = parameter.grad
                    finite = gradient is None or gradient.isfinite().all()
                    assert finite, f"with {options}: gradient not finite for {name}"

    def test_padding_an_image_changes_nothing(self) -> None:
        x = _tokens(2, 6 * 5, DIM)
        canvas = torch.full((2, 9, 8, DIM), torch.nan, dtype=x.dtype)
        mask = torch.zeros(2, 9, 8, dtype=torch.bool)
        canvas[:, :6, :5], mask[:, :6, :5] = x.unflatten(1, (6, 5)), True
        for layer in self.build_both(num_landmarks=4):
            got = layer(canvas.flatten(1, 2), (9, 8), mask=mask.flatten(1))
            got = got.unflatten(1, (9, 8))[:, :6, :5].flatten(1, 2)
            error = _error(got, layer(x, (6, 5)))
            assert error < 1e-9, f"with tie_qk={layer.tie_qk}: {error:.1e}"

    def test_dropped_keys_change_nothing(self) -> None:
        x, other = _tokens(1, 40, DIM), _tokens(1, 40, DIM, seed=1)
        mask = torch.arange(40) % 3 > 0
        mixed = torch.where(mask[:, None], x, 100 * other)
        for layer in self.build_both(1, num_landmarks=4):
            first, second = layer(x, mask=mask[None]), layer(mixed, mask=mask[None])
            error = _error(second[:, mask], first[:, mask])
            assert error < 1e-9, f"with tie_qk={layer.tie_qk}: {error:.1e}"

    def test_a_sample_without_keys_is_finite(self) -> None:
        mask = torch.tensor([[True] * 20, [False] * 20])
        for layer in self.build_both(1):
            x = _tokens(2, 20, DIM).requires_grad_()
            out = layer(x, mask=mask)
            (gradient,) = torch.autograd.grad(1e4 * out.square().sum(), x)  # as losses are scaled
            assert out.isfinite().all()
            assert gradient.isfinite().all()
            assert _error(out[:1], layer(x[:1])) < 1e-9, "its batch-mates change"

    def test_batch_mates_change_nothing(self) -> None:
        layer = self.build(value_conv=3)
        x = _tokens(4, 64, DIM)
        x[1], x[2] = 1.0, 1e3 * x[2]
        together = layer(x, (8, 8))
        for i in (0, 3):
            error = _error(together[i : i + 1], layer(x[i : i + 1], (8, 8)))
            assert error < 1e-9, f"batch-mates change a sample's result by {error:.1e}"

    def test_evaluation_repeats_itself(self) -> None:
        layer, x = self.build(), _tokens(2, 64, DIM)
        assert torch.equal(layer(x, (8, 8)), layer(x, (8, 8)))
        assert torch.equal(layer(x, (8, 8)), copy.deepcopy(layer)(x, (8, 8)))

    def test_the_order_of_tokens(self) -> None:
        if not attention_class(self.name).equivariant:
            import pytest  # only here: benchmarks run some of these tests without pytest

            pytest.skip(f"{self.name} does not declare `equivariant`")
        layer, x = self.build(1), _tokens(2, 40, DIM)
        order = torch.randperm(40)
        assert _error(layer(x[:, order]), layer(x)[:, order]) < 1e-9

    def test_context(self) -> None:
        layer = self.build(num_landmarks=4)
        x, context = _tokens(2, 8 * 8, DIM), _tokens(2, 6 * 5, DIM, seed=1)
        if not attention_class(self.name).cross_attention:
            assert "context" in _refusal(layer, x, (8, 8), context, (6, 5))
            return
        out = layer(x, (8, 8), context, (6, 5))
        assert out.shape == x.shape
        padded = torch.cat([context, torch.full((2, 10, DIM), torch.nan)], 1)
        mask = (torch.arange(40) < 30).expand(2, -1)
        assert _error(layer(x, (8, 8), padded, (8, 5), mask), out) < 1e-9

    def test_half_precision(self) -> None:
        layer = self.build(value_conv=3).float()
        x = _tokens(2, 12 * 12, DIM).float()
        expected = layer(x, (12, 12))
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                got = layer(x, (12, 12))
            assert got.dtype == dtype
            assert _error(got, expected) < 0.05, f"autocast to {dtype}"
            got = copy.deepcopy(layer).to(dtype)(x.to(dtype), (12, 12))
            assert got.dtype == dtype
            assert _error(got, expected) < 0.1, f"in {dtype}"

    def test_weights_are_saved_and_loaded(self) -> None:
        layer, other, x = self.build(), self.build(seed=1), _tokens(2, 64, DIM)
        for tensor in other.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x, (8, 8)), layer(x, (8, 8)))

    def test_cost_grows_as_declared(self) -> None:
        """With 16 x 16 and 32 x 32 tokens and the same number of landmarks."""
        counts = []
        for side in (16, 32):
            layer = self.build(num_landmarks=16, max_size=(side, side), ratio=side // 4).float()
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                layer(_tokens(1, side * side, DIM).float(), (side, side))
            counts.append(counter.get_total_flops())
        growth = counts[1] / counts[0]
        if attention_class(self.name).linear:
            assert growth < 4.5, f"declared linear, but 4 times the tokens cost {growth:.1f}"
        else:
            assert growth > 6, f"declared quadratic, but 4 times the tokens cost {growth:.1f}"


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _error(got: Tensor, expected: Tensor) -> float:
    """The relative error over all entries."""
    got, expected = got.detach().double(), expected.detach().double()
    return ((got - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def _refusal(layer: MultiHeadAttention, *arguments: Any) -> str:
    try:
        layer(*arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError("the layer should have raised ValueError")
