"""The peers compute what independent implementations compute, or what they tend to."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from linformer import LinformerSelfAttention
from nystrom_attention import NystromAttention
from performer_pytorch.performer_pytorch import FastAttention
from reformer_pytorch import LSHAttention
from timm.models.pvt_v2 import Attention as PvtAttention
from torch import Tensor, nn

from softmaxfree import SoftmaxFreeAttention, gaussian_attention
from softmaxfree.layers.agent import AgentAttention, AgentBias
from softmaxfree.layers.linformer import LinformerAttention
from softmaxfree.layers.multihead import Layout
from softmaxfree.layers.nystromformer import NystromformerAttention, softmax_pinv
from softmaxfree.layers.performer import PerformerAttention, favor, orthogonal_directions
from softmaxfree.layers.reformer import ReformerAttention, fixed_rotations, lsh_attention
from softmaxfree.layers.registry import ATTENTIONS
from softmaxfree.layers.skyformer import SkyformerAttention
from softmaxfree.layers.softmax import SoftmaxAttention
from softmaxfree.layers.spatial_reduction import SpatialReductionAttention

from ..helpers import relative_error, tokens


def ready(layer: nn.Module) -> nn.Module:
    return layer.double().eval()


def copy_projections(ours: nn.Module, q: Tensor, k: Tensor, v: Tensor, proj: nn.Linear) -> None:
    """Weights of an implementation without biases but in the last projection."""
    for layer, weight in ((ours.q, q), (ours.k, k), (ours.v, v)):
        layer.weight.data.copy_(weight)
    ours.proj.load_state_dict(proj.state_dict())


def test_softmax_is_torchs_multi_head_attention() -> None:
    ours = ready(SoftmaxAttention(12, 3, ndim=1, tie_qk=False))
    theirs = ready(nn.MultiheadAttention(12, 3, batch_first=True))
    q, k, v = theirs.in_proj_weight.chunk(3)
    biases = theirs.in_proj_bias.data.normal_().chunk(3)
    for layer, weight, bias in zip((ours.q, ours.k, ours.v), (q, k, v), biases):
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
    ours.proj.load_state_dict(theirs.out_proj.state_dict())
    x, mask = tokens(2, 20, 12), torch.rand(2, 20) < 0.7
    expected, _ = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)
    assert relative_error(ours(x, mask=mask), expected) < 1e-12


@pytest.mark.parametrize("n", [20, 32], ids=["shorter", "whole"])
def test_linformer(n: int) -> None:
    theirs = ready(LinformerSelfAttention(12, 32, k=8, heads=3))
    ours = ready(LinformerAttention(12, 3, ndim=1, max_size=(32,), num_landmarks=8, qkv_bias=False))
    copy_projections(
        ours, theirs.to_q.weight, theirs.to_k.weight, theirs.to_v.weight, theirs.to_out
    )
    ours.mix_keys.data.copy_(theirs.proj_k.T)
    ours.mix_values.data.copy_(theirs.proj_v.T)
    x = tokens(2, n, 12)
    assert relative_error(ours(x), theirs(x)) < 1e-12
    context = tokens(2, 11, 12, seed=1)
    assert relative_error(ours(x, None, context), theirs(x, context=context)) < 1e-12


def test_linformer_with_a_full_projection_is_softmax() -> None:
    ours = ready(LinformerAttention(12, 3, max_size=(4, 5), ratio=1, prefix_tokens=1))
    for weight in (ours.mix_keys, ours.mix_values):
        nn.init.eye_(weight)
    softmax = ready(SoftmaxAttention(12, 3, tie_qk=False, prefix_tokens=1))
    softmax.load_state_dict(ours.state_dict(), strict=False)
    x = tokens(2, 21, 12)
    assert relative_error(ours(x, (4, 5)), softmax(x, (4, 5))) < 1e-12


def test_linformer_refuses_what_it_has_no_projection_for() -> None:
    layer = ready(LinformerAttention(12, 3, max_size=(4, 5), num_landmarks=4))
    with pytest.raises(ValueError, match=r"learned for at most \(4, 5\) tokens, got \(5, 5\)"):
        layer(tokens(1, 25, 12), (5, 5))
    with pytest.raises(ValueError, match=r"max_size must be 2 sides of 1 or more, got \(4,\)"):
        LinformerAttention(12, 3, max_size=(4,))


def test_linformer_has_as_many_mixtures_as_soft_has_landmarks() -> None:
    for size, options in (
        ((4, 4), {"num_landmarks": 49}),
        ((16, 3), {"num_landmarks": 49}),
        ((10, 3), {"ratio": 4}),
        ((64, 64), {"ratio": 16, "num_landmarks": 9}),
        ((20,), {"num_landmarks": 30}),
        ((20,), {"num_landmarks": 6}),
    ):
        common = {"ndim": len(size), "prefix_tokens": 1} | options
        ours = LinformerAttention(12, 3, max_size=size, **common)
        soft = SoftmaxFreeAttention(12, 3, sampler="avg", **common)
        x = torch.zeros(1, 3, 1 + math.prod(size), 4)
        landmarks, _ = soft.sample(x, size, None)
        assert ours.mix_keys.shape == (landmarks.shape[-2], x.shape[-2])


def test_linformer_refuses_bad_numbers_of_mixtures() -> None:
    for options, message in (
        ({"ratio": 0}, "ratio must be at least 1, got 0"),
        ({"num_landmarks": 0}, "num_landmarks must be at least 1, got 0"),
        ({"num_landmarks": -3}, "num_landmarks must be at least 1, got -3"),
        ({"num_landmarks": 5}, "num_landmarks must be a square number for images, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            LinformerAttention(12, 3, max_size=(4, 5), **options)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_spatial_reduction_is_pvts(ratio: int) -> None:
    theirs = ready(PvtAttention(12, 3, sr_ratio=ratio, linear_attn=False, qkv_bias=True))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = ready(SpatialReductionAttention(12, 3, ratio=ratio))
    state = theirs.state_dict()
    for name in ("weight", "bias"):
        state[f"k.{name}"], state[f"v.{name}"] = state.pop(f"kv.{name}").chunk(2)
        if ratio > 1:
            state[f"reduction_norm.{name}"] = state.pop(f"norm.{name}")
    if ratio > 1:
        state["reduction.weight"], state["reduction_bias"] = (
            state.pop("sr.weight"), state.pop("sr.bias")
        )  # fmt: skip
    ours.load_state_dict(state)
    x = tokens(2, 64, 12)
    assert relative_error(ours(x, (8, 8)), theirs(x, (8, 8))) < 1e-12


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("options", "grid"),
    [({"ratio": 2}, (5, 4)), ({"ratio": 2, "num_landmarks": 9}, (3, 3)), ({"ratio": 1}, (9, 8))],
    ids=str,
)
def test_spatial_reduction_names_the_grid_it_leaves(
    options: dict[str, int], grid: tuple[int, int], masked: bool
) -> None:
    layer = SpatialReductionAttention(12, 3, prefix_tokens=1, **options)
    mask = torch.ones(2, 73, dtype=torch.bool) if masked else None
    reduced, size, kept = layer.reduce(torch.randn(2, 73, 12), (9, 8), mask)
    assert size == grid
    assert reduced.shape[1] == 1 + math.prod(grid)
    assert kept is None if mask is None else kept.shape == reduced.shape[:2]


def test_spatial_reduction_refuses_a_bad_ratio() -> None:
    with pytest.raises(ValueError, match="ratio must be at least 1, got 0"):
        SpatialReductionAttention(12, 3, ratio=0)


def test_performer() -> None:
    """With the features that performer-pytorch has drawn."""
    theirs = FastAttention(8, nb_features=20).double()
    q, k, v = tokens(3, 2, 3, 30, 8).unbind()
    expected = theirs(q, k, v)
    assert relative_error(favor(q, k, v, theirs.projection_matrix, None), expected) < 1e-12


def test_performer_with_many_features_is_softmax() -> None:
    torch.manual_seed(0)
    q, k, v = (0.5 * tokens(3, 1, 2, 30, 8)).unbind()
    expected = F.scaled_dot_product_attention(q, k, v)
    errors = [
        relative_error(favor(q, k, v, orthogonal_directions(count, 8).double(), None, 0), expected)
        for count in (64, 65_536)
    ]
    assert errors[1] < 0.02
    assert errors[1] < errors[0] / 5


def test_performers_features_are_orthogonal_and_of_normal_length() -> None:
    torch.manual_seed(0)
    directions = orthogonal_directions(4000, 8)
    block = F.normalize(directions[:8], dim=-1)
    torch.testing.assert_close(block @ block.T, torch.eye(8))
    assert directions.square().sum(-1).mean() == pytest.approx(8, rel=0.05)
    assert directions.mean(0).abs().max() < 0.1


def test_performer_draws_features_anew_in_training_alone() -> None:
    torch.manual_seed(0)
    layer, x = PerformerAttention(12, 3, ndim=1, redraw=4), torch.randn(1, 10, 12)

    def changes(steps: int) -> int:
        count = 0
        for _ in range(steps):
            before = layer.projection.clone()
            layer(x)
            count += not torch.equal(before, layer.projection)
        return count

    assert 20 <= changes(160) <= 60
    layer.eval()
    assert changes(40) == 0
    layer.train().redraw = 0
    assert changes(40) == 0
    assert "projection" in layer.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_keep_their_type_under_autocast(dtype: torch.dtype) -> None:
    layer, x = PerformerAttention(12, 3, ndim=1, redraw=1), torch.randn(1, 10, 12)
    before = layer.projection
    with torch.autocast("cpu", dtype):
        layer(x)
    assert not torch.equal(layer.projection, before)
    assert layer.projection.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_features_are_of_the_default_type(dtype: torch.dtype) -> None:
    """And drawn in float32: there is no QR decomposition in bfloat16."""
    torch.set_default_dtype(dtype)
    try:
        layer, x = PerformerAttention(12, 3, ndim=1, redraw=1), torch.randn(1, 10, 12)
        assert layer(x).dtype == layer.projection.dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_redrawn_step_survives_gradient_checkpointing() -> None:
    """The step is computed twice: both times with the same features."""
    from torch.utils.checkpoint import checkpoint

    layer, x = PerformerAttention(12, 3, ndim=1, redraw=1), torch.randn(1, 10, 12)
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        layer.zero_grad()
        out = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        out.square().sum().backward()
        gradients.append(layer.q.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_nystromformer() -> None:
    """One sample and one head: their start of the inverse is that of the whole batch."""
    theirs = ready(NystromAttention(8, dim_head=8, heads=1, num_landmarks=5, residual=False))
    ours = ready(NystromformerAttention(8, 1, ndim=1, num_landmarks=5, qkv_bias=False))
    copy_projections(ours, *theirs.to_qkv.weight.chunk(3), theirs.to_out[0])
    x = tokens(1, 40, 8)
    assert relative_error(ours(x), theirs(x)) < 1e-12


def test_nystromformer_with_all_landmarks_is_softmax() -> None:
    ours = ready(NystromformerAttention(12, 3, ratio=1, iters=30))
    softmax = ready(SoftmaxAttention(12, 3, tie_qk=False))
    softmax.load_state_dict(ours.state_dict())
    x = 3 * tokens(2, 16, 12)
    assert relative_error(ours(x, (4, 4)), softmax(x, (4, 4))) < 1e-6


def test_nystromformer_averages_tied_tokens_once() -> None:
    layer, x = ready(NystromformerAttention(12, 3, ndim=1, tie_qk=True)), tokens(2, 20, 12)
    calls: list[object] = []
    layer.sampler.register_forward_hook(lambda *call: calls.append(call))
    q, v = layer._heads(layer.q(x)), layer._heads(layer.v(x))
    mask = (torch.arange(20) < 13).expand(2, -1)
    layout = Layout((20,), (20,), mask, mask)
    got = layer.attend(q, q, v, layout)
    assert len(calls) == 1
    torch.testing.assert_close(layer.attend(q, q.clone(), v, layout), got)
    assert len(calls) == 3


def test_nystromformers_inverse_is_that_of_each_matrix() -> None:
    a = (3 * tokens(6, 5, 5)).softmax(-1)
    inverses = softmax_pinv(a, 30)
    torch.testing.assert_close(inverses, torch.linalg.pinv(a), rtol=1e-6, atol=1e-6)
    far = torch.cat([a[:1], 1e3 * a[1:]])
    torch.testing.assert_close(softmax_pinv(far, 6)[0], softmax_pinv(a, 6)[0])


@pytest.mark.parametrize(
    ("size", "context_size"),
    [((6, 8), (6, 8)), ((9, 5), (4, 11)), ((2, 9), (6, 8))],
    ids=["size of the biases", "other sizes", "fewer tokens than agents"],
)
def test_agent_is_its_formula(size: tuple[int, int], context_size: tuple[int, int]) -> None:
    layer = ready(AgentAttention(12, 3, max_size=(6, 8), num_landmarks=9, prefix_tokens=1))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, context = tokens(2, 1 + math.prod(size), 12), tokens(2, 1 + math.prod(context_size), 12)
    q, k, v = (layer._heads(part) for part in (layer.q(x), layer.k(context), layer.v(context)))
    height, width = min(3, size[0]), min(3, size[1])
    image = q[:, :, 1:].mT.unflatten(-1, size).flatten(0, 1)
    agents = F.adaptive_avg_pool2d(image, (height, width)).flatten(2).mT.unflatten(0, (2, 3))

    def written_out(bias: AgentBias, size: tuple[int, int]) -> Tensor:
        rows, columns = bias.lines
        parts = (bias.block, rows.unsqueeze(-1), columns.unsqueeze(-2))
        sizes = (size, (size[0], 1), (1, size[1]))
        resized = [
            F.interpolate(part.flatten(0, 1), size, mode="bilinear").unflatten(0, (3, 3))
            for part, size in zip(parts, sizes)
        ]
        places = sum(resized).flatten(3)
        return torch.cat([bias.prefix, places], -1)[:, :height, :width].flatten(1, 2)

    from_keys = (agents @ k.mT / 2 + written_out(layer.key_bias, context_size)).softmax(-1)
    to_queries = (q @ agents.mT / 2 + written_out(layer.query_bias, size).mT).softmax(-1)
    expected = layer.proj((to_queries @ from_keys @ v).transpose(1, 2).flatten(2))
    assert relative_error(layer(x, size, context, context_size), expected) < 1e-12


def test_agents_of_sequences_are_its_formula() -> None:
    layer = ready(AgentAttention(12, 3, ndim=1, max_size=(30,), ratio=6))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = tokens(2, 41, 12)
    q, k, v = (layer._heads(part(x)) for part in (layer.q, layer.k, layer.v))
    agents = F.adaptive_avg_pool1d(q.mT.flatten(0, 1), 5).mT.unflatten(0, (2, 3))
    first, second = (
        F.interpolate(bias.block, 41, mode="linear") for bias in (layer.key_bias, layer.query_bias)
    )
    from_keys = (agents @ k.mT / 2 + first).softmax(-1)
    to_queries = (q @ agents.mT / 2 + second.mT).softmax(-1)
    expected = layer.proj((to_queries @ from_keys @ v).transpose(1, 2).flatten(2))
    assert relative_error(layer(x), expected) < 1e-12


def test_the_number_of_agents() -> None:
    for options, expected in (
        ({}, (7, 5)),
        ({"ratio": 4}, (4, 2)),
        ({"num_landmarks": 9}, (3, 3)),
        ({"ratio": 4, "num_landmarks": 9}, (3, 3)),
    ):
        layer = AgentAttention(12, 3, max_size=(16, 5), **options)
        assert layer.agents == expected
        assert layer.key_bias.block.shape == (3, *expected, 7, 7)
    with pytest.raises(ValueError, match="ratio must be at least 1, got 0"):
        AgentAttention(12, 3, max_size=(16, 5), ratio=0)
    with pytest.raises(ValueError, match=r"max_size must be 2 sides of 1 or more, got \(4,\)"):
        AgentAttention(12, 3, max_size=(4,))


def test_agent_is_exported_for_all_sizes() -> None:
    stage = timm.create_model("softpp_nano", attention="agent").stages[1].eval()
    any_size = ({2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    x = torch.randn(2, 32, 12, 16)
    graph = torch.export.export(stage, (x,), dynamic_shapes=any_size, strict=False).module()
    for height, width in ((12, 16), (5, 20), (20, 5)):
        other = torch.randn(2, 32, height, width)
        assert relative_error(graph(other)[0], stage(other)[0]) < 1e-5


def test_reformer() -> None:
    """One round: beyond it, a round's first chunk looks back at another round's last one there."""
    n, bucket, width = 64, 8, 6
    theirs = LSHAttention(bucket_size=bucket, n_hashes=1).double().eval()
    qk, v = tokens(2, 2, 3, n, width).unbind()
    torch.manual_seed(0)
    expected, *_ = theirs(qk.flatten(0, 1), v.flatten(0, 1))
    torch.manual_seed(0)
    drawn = torch.randn(1, width, 1, n // bucket // 2, dtype=torch.float64)
    got = lsh_attention(qk, v, drawn[0].permute(1, 2, 0), bucket, None)
    assert relative_error(got.flatten(0, 1), expected) < 1e-12


def test_reformers_rounds_are_weighted_by_what_they_found() -> None:
    """Against all pairs at once, those masked that are in no common chunk."""
    n, bucket, rounds = 44, 8, 3
    qk, v = tokens(2, 1, 1, n, 6).unbind()
    rotations = tokens(rounds, 3, 6, seed=1)
    scores = (qk @ F.normalize(qk, dim=-1).mT / math.sqrt(6))[0, 0]
    scores.fill_diagonal_(-5e4)
    results, weights = [], []
    for rotation in rotations:
        places = qk[0, 0] @ rotation.T
        order = torch.cat([places, -places], -1).argmax(-1).argsort(stable=True)
        chunks = list(order.split(bucket))
        visible = torch.full((n, n), -math.inf, dtype=torch.float64)
        for i, chunk in enumerate(chunks):
            visible[chunk[:, None], torch.cat([chunk, chunks[i - 1]])] = 0
        results.append((scores + visible).softmax(-1) @ v[0, 0])
        weights.append((scores + visible).logsumexp(-1))
    expected = (torch.stack(weights).softmax(0).unsqueeze(-1) * torch.stack(results)).sum(0)
    assert relative_error(lsh_attention(qk, v, rotations, bucket, None)[0, 0], expected) < 1e-12


def test_reformer_that_sees_all_is_softmax_of_normalised_keys() -> None:
    qk, v = tokens(2, 2, 3, 19, 6).unbind()
    scores = qk @ F.normalize(qk, dim=-1).mT / math.sqrt(6)
    scores.diagonal(dim1=-2, dim2=-1).fill_(-5e4)
    expected = scores.softmax(-1) @ v
    for bucket in (10, 19, 64):
        rotations = tokens(3, 1, 6, seed=1)
        assert relative_error(lsh_attention(qk, v, rotations, bucket, None), expected) < 1e-12


def test_reformer_finds_the_nearest() -> None:
    """A token's twin, 64 buckets away, is nearly all that it attends to."""
    torch.manual_seed(0)
    half = 200 * F.normalize(tokens(1, 1, 512, 16), dim=-1)
    qk = torch.cat([half, half + tokens(1, 1, 512, 16, seed=1)], -2)
    v = torch.arange(1024.0, dtype=torch.float64).expand(1, 1, 16, -1).mT
    found = lsh_attention(qk, v, tokens(8, 32, 16, seed=2), 16, None)[0, 0, :, 0]
    twins = torch.cat([torch.arange(512, 1024), torch.arange(512)])
    assert ((found - twins).abs() < 60).double().mean() > 0.9


def test_reformers_fixed_directions_are_as_normal_vectors() -> None:
    cpu = torch.device("cpu")
    drawn = fixed_rotations(4, 400, 16, cpu)
    assert torch.equal(fixed_rotations(4, 7, 16, cpu), drawn[:, :7])
    values = drawn.flatten().sort().values
    expected = torch.special.ndtri((torch.arange(len(values)) + 0.5) / len(values))
    assert (values - expected).abs().mean() < 0.02
    flat = drawn.flatten(0, 1)
    assert (flat.T @ flat / len(flat) - torch.eye(16)).abs().max() < 0.15
    for axis in range(3):  # neighbours have nothing in common
        n = drawn.shape[axis] - 1
        for x in (drawn, drawn.square() - 1):
            assert (x.narrow(axis, 0, n) * x.narrow(axis, 1, n)).mean().abs() < 0.05


def test_reformer_is_exported_and_leaves_nothing_behind() -> None:
    layer, x = ReformerAttention(12, 3, ndim=1, bucket=8).eval(), torch.randn(2, 50, 12)
    expected = layer(x)
    any_length = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    graph = torch.export.export(layer, (x,), dynamic_shapes=any_length, strict=False).module()
    for batch, n in ((2, 50), (3, 27), (1, 80)):
        other = torch.randn(batch, n, 12)
        assert relative_error(graph(other), layer(other)) < 1e-6
    with torch.device("meta"):
        assert ReformerAttention(12, 3, ndim=1, bucket=8).eval()(torch.randn(2, 50, 12)).is_meta
    assert torch.equal(layer(x), expected)


def test_reformer_has_one_projection_for_queries_and_keys() -> None:
    with pytest.raises(ValueError, match="Reformer's queries are its keys"):
        ReformerAttention(12, 3, tie_qk=False)


def test_skyformer_with_all_tokens_is_gaussian_attention() -> None:
    layer = ready(SkyformerAttention(12, 3, ndim=1, ridge=1e-9))
    q, k, v = tokens(3, 2, 3, 16, 4).unbind()
    # All 2 x 16 are drawn where the grid of queries is said to have as many places.
    layer.sampler.count = lambda size: 32  # type: ignore[method-assign]
    got = layer.attend(q, k, v, Layout((16,), (16,), None, None))
    assert relative_error(got, gaussian_attention(q, k, v)) < 1e-5


def test_skyformer_draws_from_queries_and_keys() -> None:
    layer = ready(SkyformerAttention(12, 3, ndim=1, num_landmarks=8))
    seen = []
    layer.sampler.count = lambda size: seen.append(size) or 8  # type: ignore[method-assign]
    x = tokens(1, 64, 12)
    fixed = layer(x)
    assert seen == [(64,)]
    assert torch.equal(fixed, layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_exact_gaussian_attention_with_and_without_normalisation() -> None:
    for normalize in (False, True):
        layer = ready(ATTENTIONS["gaussian"](12, 3, ndim=1, normalize=normalize))
        x = tokens(2, 20, 12)
        q, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in (layer.q(x), layer.v(x)))
        kernel = torch.exp(-torch.cdist(q, q).square() / (2 * 4**0.5))
        if normalize:
            root = kernel.sum(-1).rsqrt()
            kernel = root.unsqueeze(-1) * kernel * root.unsqueeze(-2)
        expected = layer.proj((kernel @ v).transpose(1, 2).flatten(2))
        assert relative_error(layer(x), expected) < 1e-10


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_works_in_every_backbone(name: str) -> None:
    for model in ("softpp_nano", "softpp_vit_small"):
        arguments = {"depth": 2} if "vit" in model else {}
        net = timm.create_model(model, attention=name, num_classes=3, img_size=64, **arguments)
        images = torch.randn(2, 3, 64, 64)
        nn.functional.cross_entropy(net(images), torch.tensor([0, 1])).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
        assert net.eval()(images[:, :, :48, :33]).isfinite().all()


def test_options_of_an_attention_alone() -> None:
    net = timm.create_model("softpp_nano", attention="performer", attention_options={"features": 7})
    assert net.stages[0].blocks[0].attention.features == 7
    with pytest.raises(ValueError, match="attention 'softpp' has no features; leave it out, or"):
        timm.create_model("softpp_nano", attention_options={"features": 7})
    with pytest.raises(ValueError, match="unknown attention 'nope'; choose one of soft, softpp"):
        timm.create_model("softpp_nano", attention="nope")
