"""Parity with the authors' released code, layer by layer: outputs and gradients."""

import pytest
import torch
from torch import nn

from softmaxfree import SoftmaxFreeAttention, pinv
from softmaxfree.layers.blocks import PostNormBlock
from softmaxfree.ops.attention import landmark_attention

from .conftest import Golden
from .released import assert_close

TAGS = ["r8_24x16", "r4_16x12", "r2_8x6", "r4_19x13_nondiv", "r2_8x6_noconv"]
VALUE_CONV = dict(zip(TAGS, [9, 5, 3, 5, None]))
NEWTON = ["m4_well", "m9_mid", "m49_mid", "m49_well", "m49_nearrank1", "m16_identity"]
INVERSE = {"base": "damped", "norm": "released_backtrack"}

pytestmark = pytest.mark.usefixtures("released_backtrack")


@pytest.mark.parametrize("name", NEWTON)
def test_damped_newton(name: str, golden_layers: Golden) -> None:
    entry = golden_layers.below(f"newton/{name}/")
    f32 = 1e-4 if name == "m49_nearrank1" else 1e-5
    a = entry["A"].requires_grad_()
    inverse = pinv(a, "damped")
    assert_close(inverse, entry["damped_out"], golden_layers, f32)
    (gradient,) = torch.autograd.grad(inverse, a, entry["cotangent"])
    assert_close(gradient, entry["damped_grad_analytic"], golden_layers, f32)
    assert_close(pinv(a, "damped", iters=10), entry["damped_out_iter10"], golden_layers, f32)


@pytest.mark.parametrize("name", NEWTON)
def test_backtracking_newton(name: str, golden_layers: Golden) -> None:
    entry = golden_layers.below(f"newton/{name}/")
    f32 = 1e-4 if name == "m49_nearrank1" else 1e-5
    a = entry["A"].requires_grad_()
    inverse = pinv(a, "released_backtrack")
    assert_close(inverse, entry["backtrack_out"], golden_layers, f32)
    if name == "m49_well" and golden_layers.dtype == torch.float32:
        return  # differs by 23 % between float32 and float64 in the released code itself
    (gradient,) = torch.autograd.grad(inverse, a, entry["cotangent"])
    assert_close(gradient, entry["backtrack_grad_autograd"], golden_layers, f32)


@pytest.mark.parametrize("name", NEWTON)
def test_backtracking_per_matrix_agrees_where_the_release_works(
    name: str, golden_layers: Golden
) -> None:
    """Taken alone, a matrix gets from `backtrack` what the release's scheme gives it."""
    entry = golden_layers.below(f"newton/{name}/")
    for a in entry["A"].flatten(0, 1):
        assert_close(pinv(a, "backtrack"), pinv(a, "released_backtrack"), golden_layers)


def layer(tag: str, kind: str, dim: int, **kwargs: object) -> SoftmaxFreeAttention:
    return SoftmaxFreeAttention(
        dim,
        num_heads=2,
        ratio=int(tag[1]),
        normalize=kind == "norm",
        inverse=INVERSE[kind],
        value_conv=VALUE_CONV[tag],
        pad="drop",
        **kwargs,
    )


def grid(tag: str) -> tuple[int, int]:
    height, width = tag.split("_")[1].split("x")
    return int(height), int(width)


@pytest.mark.parametrize("kind", ["base", "norm"])
@pytest.mark.parametrize("tag", TAGS)
def test_attention_kernel(tag: str, kind: str, golden_layers: Golden) -> None:
    """The attention without its projections: sampling, kernel, inverse, value convolution."""
    entry = golden_layers.below(f"kernel/{kind}/{tag}/")
    attention = layer(tag, kind, dim=16).to(golden_layers.dtype)
    renamed = {
        "sampler.weight": "Qlandmark_op.weight",
        "landmark_norm.0.weight": "Qnorm_act.0.weight",
        "landmark_norm.0.bias": "Qnorm_act.0.bias",
        "value_conv.weight": "conv.weight",
    }
    if VALUE_CONV[tag] is None:
        del renamed["value_conv.weight"]
    for ours, theirs in renamed.items():
        attention.get_parameter(ours).data.copy_(entry[f"state/{theirs}"])

    q, v = entry["Q"].requires_grad_(), entry["V"].requires_grad_()
    size = grid(tag)
    landmarks, _ = attention.sampler(q, size, None)
    landmarks = attention.landmark_norm(landmarks * 8**-0.25)
    out = landmark_attention(
        q, q, v, landmarks, attention.inversion, normalize=attention.normalize, landmark_scale=1.0
    )
    if attention.value_conv is not None:
        local = attention.value_conv(v.transpose(1, 2).flatten(2), size)
        out = out + local.unflatten(-1, (2, 8)).transpose(1, 2)
    assert_close(out, entry["out"], golden_layers)

    out.backward(entry["cotangent"])
    assert_close(q.grad, entry["grad_Q"], golden_layers)
    assert_close(v.grad, entry["grad_V"], golden_layers)
    for ours, theirs in renamed.items():
        gradient = attention.get_parameter(ours).grad
        assert_close(gradient, entry[f"grad/{theirs}"], golden_layers)


@pytest.mark.parametrize("kind", ["base", "norm"])
@pytest.mark.parametrize("tag", TAGS)
def test_block(tag: str, kind: str, golden_layers: Golden) -> None:
    """A whole released block: projections, attention, post-norm, tanh-GELU network."""
    entry = golden_layers.below(f"block/{kind}/{tag}/")
    block = PostNormBlock(
        layer(tag, kind, dim=16), 16, act_layer=lambda: nn.GELU(approximate="tanh")
    ).to(golden_layers.dtype)
    renamed = {
        "attention.q": "mha.W_q",
        "attention.v": "mha.W_v",
        "attention.proj": "mha.ff",
        "attention.sampler": "mha.attn.Qlandmark_op",
        "attention.landmark_norm.0": "mha.attn.Qnorm_act.0",
        "attention.value_conv": "mha.attn.conv",
        "mlp.fc1": "ff1",
        "mlp.fc2": "ff2",
        "norm1": "norm1",
        "norm2": "norm2",
    }
    parameters = {}
    for name, parameter in block.named_parameters():
        module, _, leaf = name.rpartition(".")
        parameters[f"att.{renamed[module]}.{leaf}"] = parameter
    state = golden_layers.below(f"block/{kind}/{tag}/state/")
    assert set(parameters) == set(state)
    for name, parameter in parameters.items():
        parameter.data.copy_(state[name])

    x = entry["X"].requires_grad_()
    assert_close(block.attention(x, grid(tag)), entry["mha_out"], golden_layers)
    out = block(x, grid(tag))
    assert_close(out, entry["out"], golden_layers)
    out.backward(entry["cotangent"])
    assert_close(x.grad, entry["grad_X"], golden_layers)
    for name, parameter in parameters.items():
        assert_close(parameter.grad, entry[f"grad/{name}"], golden_layers)
