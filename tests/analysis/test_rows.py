"""Rows of attention matrices: those of the matrix, for every attention."""

import re
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from softmaxfree import MultiHeadAttention, attention_rows, recorded_attention, replace_attention
from softmaxfree.analysis.attention_record import AttentionRecord
from softmaxfree.layers.registry import ATTENTIONS, attention_class, build_attention

from ..helpers import relative_error, tokens

DIM, HEADS = 24, 3
LINEAR = [name for name in ATTENTIONS if attention_class(name).linear]


def build(name: str, **options: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    defaults = {"ratio": 2, "max_size": (32, 32), "bucket": 4, "prefix_tokens": 1, "value_conv": 3}
    return build_attention(name, DIM, HEADS, **(defaults | options)).double().eval()


def record_of(layer: MultiHeadAttention, *inputs: Any, **options: Any) -> AttentionRecord:
    with recorded_attention(layer) as layers:
        layer(*inputs, **options)
    (record,) = layers.values()
    return record


def matrix(record: AttentionRecord) -> Tensor:
    """S, (B, heads, N, L), column by column: what the layer makes of values that are 1 once."""
    columns = []
    for part in torch.eye(record.v.shape[-2], dtype=record.v.dtype).split(record.v.shape[-1], 1):
        values = torch.zeros_like(record.v)
        values[..., : part.shape[1]] = part
        out = record.attention.attend(record.q, record.k, values, record.layout)
        columns.append(out[..., : part.shape[1]])
    return torch.cat(columns, -1).detach()


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("prefix", [0, 1], ids=["grid", "prefix"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"middle": "inverse"},
        {"middle": "inverse", "normalize": True, "tie_qk": True, "key_weights": False},
        {"landmarks_of": "both", "tie_qk": True},
    ],
    ids=str,
)
def test_factors_of_softx_are_those_of_its_matrix(
    options: dict[str, Any], prefix: int, masked: bool
) -> None:
    layer, count = build("softx", prefix_tokens=prefix, **options), prefix + 5 * 4
    if layer.key_weights is not None:
        nn.init.normal_(layer.key_weights)
    mask = torch.arange(count).expand(2, -1) % 7 < 4 if masked else None
    record = record_of(layer, 2 * tokens(2, count, DIM), (5, 4), mask=mask)
    factors, queries = record.factors(), list(range(count))
    rows = factors.rows(queries)
    assert relative_error(rows, record.rows_by_gradient(queries)) < 1e-9
    assert relative_error(factors.attend(record.v), rows @ record.v) < 1e-9
    inverted = "middle" in options
    assert (factors.A is not None) == (factors.A_inverse is not None) == inverted
    if not inverted:
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))


def test_factors_of_softx_do_not_underflow() -> None:
    """Tokens so far apart that all kernels are 0 in float32."""
    layer = build("softx").float()
    record = record_of(layer, 300 * tokens(1, 21, DIM, dtype=torch.float32), (5, 4))
    rows = record.factors().rows(range(21))
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))
    assert (rows - record.rows_by_gradient(range(21))).abs().max() < 1e-2


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_rows_are_those_of_the_matrix(name: str, masked: bool) -> None:
    layer, x = build(name), tokens(2, 1 + 5 * 4, DIM)
    mask = torch.arange(21).expand(2, -1) != 6 if masked else None
    record = record_of(layer, x, (5, 4), mask=mask)
    expected = matrix(record)
    queries = [0, 1, 12, 20]
    rows = record.rows(queries)
    assert rows.shape == (2, HEADS, 4, record.v.shape[-2])
    assert (rows - expected[:, :, queries]).abs().max() < 1e-6
    assert torch.equal(record.rows(queries, head=2), rows[:, 2])
    heads = (rows @ record.v).transpose(1, 2).flatten(2)
    layer.value_conv = None
    assert relative_error(layer.proj(heads), layer(x, (5, 4), mask=mask)[:, queries]) < 1e-6


@pytest.mark.parametrize("name", ATTENTIONS)
def test_rows_in_single_precision(name: str) -> None:
    layer = build(name).float()
    record = record_of(layer, tokens(1, 21, DIM, dtype=torch.float32), (5, 4))
    assert (record.rows([3]) - matrix(record)[:, :, [3]]).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["soft", "softpp"])
def test_factors_and_gradients_give_the_same_rows(name: str, tied: bool) -> None:
    layer = build(name, tie_qk=tied)
    mask = torch.arange(21).expand(2, -1) < 19
    for options in ({}, {"mask": mask}):
        record = record_of(layer, tokens(2, 21, DIM), (5, 4), **options)
        by_factors, by_gradient = record.rows([0, 7]), record.rows_by_gradient([0, 7])
        assert relative_error(by_factors, by_gradient) < 1e-9


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "reformer"])
def test_rows_to_a_context(name: str) -> None:
    layer = build(name, prefix_tokens=0, value_conv=None)
    record = record_of(layer, tokens(1, 12, DIM), (3, 4), tokens(1, 30, DIM, seed=1), (5, 6))
    assert (record.rows([5]) - matrix(record)[:, :, [5]]).abs().max() < 1e-6
    expected = (3, 3) if name == "spatial_reduction" else (5, 6)
    assert record.on_grid(record.rows([5])).shape == (1, HEADS, 1, *expected)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is computed inside."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("name", LINEAR)
def test_rows_of_linear_attention_never_take_the_matrix(name: str) -> None:
    n = 32 * 32
    layer = build(name, ratio=8, prefix_tokens=0, value_conv=None)
    record = record_of(layer, tokens(1, n, DIM), (32, 32))
    with Largest() as largest:
        record.rows([100])
    assert n * DIM <= largest.elements < n * n / 4


class Even(MultiHeadAttention):
    """Somebody's own: every query has the mean of the values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Any) -> Tensor:
        return v.mean(-2, keepdim=True).expand_as(q)


def test_an_attention_of_ones_own() -> None:
    record = record_of(Even(DIM, HEADS).eval(), torch.randn(1, 12, DIM), (3, 4))
    assert torch.allclose(record.rows([2, 5]), torch.full((1, HEADS, 2, 12), 1 / 12))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("softpp_nano", attention="softpp").eval()


@pytest.fixture(scope="module")
def image() -> Tensor:
    return tokens(3, 32, 48, dtype=torch.float32)


def test_maps_of_every_layer_of_a_model(model: nn.Module, image: Tensor) -> None:
    with torch.no_grad(), recorded_attention(model) as layers:
        model(image[None])
    grids = [(16, 24), (8, 12), (4, 6), (4, 6), (2, 3)]
    for i, (record, grid) in enumerate(zip(layers.values(), grids, strict=True)):
        maps = attention_rows(model, image, (1, 2), i)
        assert maps.shape == (record.q.shape[1], *grid)
        number = record.attention.prefix_tokens + grid[1] + 2
        assert record.token(1, 2) == number
        expected = matrix(record)[0, :, number, record.attention.prefix_tokens :]
        assert (maps.flatten(1) - expected).abs().max() < 1e-5 * expected.abs().max()
        assert torch.equal(attention_rows(model, image[None], (1, 2), record.name, 1), maps[1])


def test_the_class_token_is_token_0(model: nn.Module, image: Tensor) -> None:
    with torch.no_grad(), recorded_attention(model) as layers:
        model(image[None])
    record = list(layers.values())[-1]
    maps = attention_rows(model, image, 0, -1)
    assert torch.equal(maps, record.rows([0])[0, :, 0, 1:].unflatten(-1, (2, 3)))


def test_places_of_the_image(model: nn.Module, image: Tensor) -> None:
    with torch.no_grad(), recorded_attention(model) as layers:
        model(image[None])
    first, *_, last = layers.values()  # 16 x 24, and a class token before 2 x 3
    assert first.token_at(0, 0) == first.token(0, 0) == 0
    assert first.token_at(0.5, 0.25) == first.token(8, 6)
    assert first.token_at(1, 1) == first.token(15, 23) == 16 * 24 - 1
    assert last.token_at(0.5, 0.25) == last.token(1, 0) == 4


def test_a_model_of_timm_with_its_attention_replaced(image: Tensor) -> None:
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3
    )
    replace_attention(vit, "softpp", num_landmarks=4, measure=False)
    assert attention_rows(vit, image[..., :32], (3, 0), "blocks.1.attn.layer").shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("query", "layer", "head", "message"),
    [
        ((16, 0), 0, None, "must be on its grid of 16 x 24 tokens, counted from 0, got (16, 0)"),
        ((-1, 0), 0, None, "must be on its grid"),
        ((1,), 0, None, "must be on its grid"),
        (384, 0, None, "must be from 0 to 383, got 384"),
        ((0, 0), 5, None, "layer must be a name or a number from -5 to 4, got 5"),
        ((0, 0), "stages.7", None, "choose one of stages.0.blocks.0.attention, stages.1"),
        ((0, 0), 0, 2, "head of layer 'stages.0.blocks.0.attention' must be from 0 to 1, got 2"),
    ],
)
def test_refusals(
    model: nn.Module, image: Tensor, query: Any, layer: Any, head: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_rows(model, image, query, layer, head)


def test_images_and_models_that_are_refused(model: nn.Module, image: Tensor) -> None:
    with pytest.raises(ValueError, match="one image"):
        attention_rows(model, image.expand(2, -1, -1, -1), (0, 0), 0)
    with pytest.raises(ValueError, match="floating-point"):
        attention_rows(model, image.to(torch.uint8), (0, 0), 0)
    with pytest.raises(ValueError, match="Linear has no attention of this package"):
        attention_rows(nn.Linear(3, 3), image, (0, 0), 0)
    record = record_of(build("softmax"), tokens(1, 21, DIM), (5, 4))
    with pytest.raises(ValueError, match="without the factors"):
        record.factors()
    with pytest.raises(ValueError, match="between 0 and 1"):
        record.token_at(0.5, 1.5)
