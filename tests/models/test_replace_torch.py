"""Another attention in torch's own modules: layouts, masks, cross-attention, encoders."""

import warnings
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from softmaxfree import recorded_attention, replace_attention, tie_qk

from ..helpers import relative_error

LENGTHS = torch.tensor([[9], [13]])
PADDING = torch.arange(13) >= LENGTHS
"""Of two sequences in a batch, True for what is padding, as torch has it."""


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """As people write it, with the weights of attention left in place."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, **options).eval()
        nn.init.normal_(self.attention.out_proj.weight)

    def forward(self, x: Tensor, context: Tensor | None = None, **others: object) -> Tensor:
        context = x if context is None else context
        return self.attention(x, context, context, **others)[0]


def encoder(**options: object) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, **({"batch_first": True} | options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot pack batches
        return nn.TransformerEncoder(layer, 2).eval()


def same(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "padded", "padded by -inf", "unbatched"])
def test_softmax_for_softmax_changes_nothing(kind: str, batch_first: bool, bias: bool) -> None:
    block = Block(batch_first=batch_first, bias=bias)
    x, context, mask = tokens(2, 7, 16), tokens(2, 13, 16, seed=1), None
    if kind == "self":
        context = None
    elif kind.startswith("padded"):
        infinite = torch.zeros(2, 13).masked_fill(PADDING, -torch.inf)
        mask = infinite if "inf" in kind else PADDING
    if kind == "unbatched":
        x, context, mask = x[0], context[0], PADDING[0]
    elif not batch_first:
        x, context = x.transpose(0, 1), context if context is None else context.transpose(0, 1)
    before, expected = deepcopy(block), block(x, context, key_padding_mask=mask)
    report = replace_attention(block, "softmax")
    assert report.kept == ("q", "k", "v", "proj")
    assert report.dropped == ("attention weights (need_weights)",)
    got = block(x, context, key_padding_mask=mask)
    assert got.shape == expected.shape
    assert relative_error(got, expected) < 1e-5
    replace_attention(block, "softpp")
    assert block(x, context, key_padding_mask=mask).shape == expected.shape
    replace_attention(block, "original")
    assert same(block, before)
    assert str(block) == str(before)
    assert torch.equal(block(x, context, key_padding_mask=mask), expected)


@pytest.mark.parametrize("name", ["softpp", "performer", "reformer"])
def test_padding_and_batch_mates_change_nothing(name: str) -> None:
    model, x = encoder(), tokens(2, 13, 16)
    replace_attention(model, name)
    x[0, 9:] = torch.nan  # padding may hold anything
    alone = model(tokens(2, 13, 16)[:1, :9])
    # Normalisations and feed-forward networks pass the padding's NaN on to itself alone.
    together = model(x, src_key_padding_mask=PADDING)
    assert relative_error(together[:1, :9], alone) < 1e-5
    x[1] = 1e3
    assert relative_error(model(x, src_key_padding_mask=PADDING)[:1, :9], alone) < 1e-5


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"batch_first": False}], ids=str)
def test_encoders_train(options: dict[str, object]) -> None:
    model = encoder(**options).train()
    report = replace_attention(model, "softpp")
    assert report.layers == 2
    assert report.dropped == (
        "k", "dropout of attention weights", "attention weights (need_weights)"
    )  # fmt: skip
    assert "dropped: k, dropout of attention weights, attention weights" in str(report)
    model(tokens(3, 11, 16)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    twin = encoder(**options)
    replace_attention(twin, "softpp")
    twin.load_state_dict(model.state_dict())
    x = tokens(2, 13, 16)
    assert torch.equal(twin(x), model.eval()(x))
    assert torch.equal(deepcopy(model)(x), model(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_does_not_bypass_the_attention() -> None:
    """Without gradients torch's encoder packs padded batches, and its layers compute softmax."""
    model, x = encoder(), tokens(2, 13, 16)
    assert model.use_nested_tensor
    with torch.no_grad():
        before = model(x, src_key_padding_mask=PADDING)
    assert (before[PADDING] == 0).all()  # as packed batches come back
    replace_attention(model, "softpp", num_landmarks=4)
    for mask, kept in ((None, ~PADDING), (PADDING, ~PADDING)):
        expected = model(x, src_key_padding_mask=mask)[kept]
        assert relative_error(expected, before[kept]) > 1e-3
        with torch.no_grad():
            assert relative_error(model(x, src_key_padding_mask=mask)[kept], expected) < 1e-6
    replace_attention(model.layers[0], "original")
    with torch.no_grad(), pytest.raises(ValueError, match="in all layers of a TransformerEncoder"):
        model(x, src_key_padding_mask=PADDING)
    replace_attention(model, "original")
    with torch.no_grad():
        assert torch.equal(model(x, src_key_padding_mask=PADDING), before)


def test_a_transformer_keeps_its_causal_attention() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 2, 32, batch_first=True).eval()
    before, causal = deepcopy(model), model.generate_square_subsequent_mask(5)
    source, target = tokens(2, 13, 16), tokens(2, 5, 16, seed=1)

    def run() -> Tensor:
        return model(source, target, tgt_mask=causal, memory_key_padding_mask=PADDING)

    expected = run()
    report = replace_attention(model, "softpp")
    assert report.layers == 1
    left = ("self_attn of TransformerDecoderLayer (causal)",
            "multihead_attn of TransformerDecoderLayer (causal)")  # fmt: skip
    assert report.left == left
    assert "left:    self_attn of TransformerDecoderLayer (causal)" in str(report)
    out = run()
    assert relative_error(out, expected) > 1e-3
    target[:, 3:] = 0  # the future
    assert relative_error(run()[:, :3], out[:, :3]) < 1e-5
    replace_attention(model, "original")
    assert same(model, before)
    with pytest.raises(ValueError, match="is causal; landmarks are made of all queries"):
        replace_attention(model.decoder, "softpp")


def test_masks_of_pairs_are_refused() -> None:
    block, x = Block(batch_first=True), tokens(2, 13, 16)
    replace_attention(block, "softpp")
    for others in ({"attn_mask": torch.zeros(13, 13)}, {"is_causal": True}):
        with pytest.raises(ValueError, match="takes no attn_mask and no is_causal: landmarks"):
            block(x, **others)
    with pytest.raises(ValueError, match="boolean, or hold 0 and -inf, and it holds other numbers"):
        block(x, key_padding_mask=torch.full((2, 13), -1e4))
    with pytest.raises(ValueError, match="key and value are two"):
        block.attention(x, x, x.clone())
    assert block.attention(x, x, x)[1] is None


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        (Block(add_bias_kv=True), "softpp", "has bias_k, .* without add_bias_kv"),
        (Block(add_zero_attn=True), "softpp", "with add_zero_attn, kdim or vdim"),
        (Block(kdim=8), "softpp", "with add_zero_attn, kdim or vdim"),
        (Block(), "linformer", "'linformer' is for sequences of one length"),
        (nn.MultiheadAttention(16, 2), "softpp", "modules that hold nn.MultiheadAttention, got"),
        (nn.ModuleDict({"a": (block := Block()), "b": nn.Sequential(block.attention)}),
         "softpp", "share an nn.MultiheadAttention"),
    ],
    ids=["bias", "zero", "widths", "linformer", "alone", "shared"],
)  # fmt: skip
def test_what_is_refused_changes_nothing(model: nn.Module, name: str, reason: str) -> None:
    before = deepcopy(model)
    with pytest.raises(ValueError, match=reason):
        replace_attention(model, name)
    assert same(model, before)
    with pytest.raises(ValueError, match=r"tie_qk is for|share an nn"):
        tie_qk(model)


def test_single_rows_of_weights_can_be_looked_at() -> None:
    model = encoder()
    replace_attention(model, "softpp", num_landmarks=4)
    with recorded_attention(model) as layers:
        model(tokens(1, 13, 16))
    assert layers["layers.1.self_attn.layer"].rows([3]).shape == (1, 2, 1, 13)
