"""What timm, and code that is written for its models, expects of a backbone."""

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from .test_backbones import build, images


@pytest.mark.parametrize("name", ["softpp_tiny", "soft_tiny_fudan"])
def test_features_have_strides_4_to_32(name: str) -> None:
    model = timm.create_model(name, features_only=True)
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    assert model.feature_info.channels() == [64, 128, 320, 512]
    maps = model(images(1, 3, 65, 90))
    assert [tuple(m.shape[1:]) for m in maps] == [
        (64, 17, 23), (128, 9, 12), (320, 5, 6), (512, 3, 3)
    ]  # fmt: skip


def test_features_of_some_stages_need_no_others() -> None:
    whole = build()
    part = timm.create_model("softpp_nano", features_only=True, out_indices=(0, 2)).eval()
    part.load_state_dict({f"model.{k}": v for k, v in whole.state_dict().items()}, strict=False)
    x = images(2, 3, 48, 48)
    expected = whole.forward_intermediates(x, indices=[0, 2], intermediates_only=True)
    for got, wanted in zip(part(x), expected, strict=True):
        assert torch.equal(got, wanted)
    assert not any(".stages.3." in f".{name}" for name, _ in part.named_parameters())
    part.train()
    sum(m.square().mean() for m in part(x)).backward()
    assert all(parameter.grad is not None for parameter in part.parameters())


def test_intermediates_agree_with_features() -> None:
    model, x = build(), images(2, 3, 48, 48)
    tokens, maps = model.forward_intermediates(x, norm=True)
    assert torch.equal(tokens, model.forward_features(x))
    torch.testing.assert_close(maps[-1].flatten(2).mT, tokens[:, 1:])
    (last,) = model.forward_intermediates(x, indices=1, intermediates_only=True)
    assert last.shape == (2, 160, 3, 3)
    early = model.forward_intermediates(x, [1], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], maps[1])


def test_intermediates_of_the_plain_transformer() -> None:
    model, x = build("softpp_vit_small", depth=3), images(2, 3, 48, 64)
    tokens, found = model.forward_intermediates(
        x, indices=2, return_prefix_tokens=True, norm=True, output_fmt="NLC"
    )
    assert [(grid.shape, prefix.shape) for grid, prefix in found] == [
        ((2, 12, 384), (2, 1, 384))
    ] * 2
    torch.testing.assert_close(torch.cat(found[-1][::-1], 1), tokens)
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW' or 'NLC'"):
        model.forward_intermediates(x, output_fmt="NHWC")


def test_pruning_leaves_what_is_asked_for() -> None:
    model = build()
    assert model.prune_intermediate_layers([1, 2]) == [1, 2]
    assert len(model.stages) == 3
    assert isinstance(model.head, nn.Identity)
    assert model(images(1, 3, 32, 32)).shape == (1, 16, 128)  # tokens of stage 3
    model.reset_classifier(5, "avg")
    assert model(images(1, 3, 32, 32)).shape == (1, 5)


def test_the_classifier_can_be_replaced() -> None:
    model = build().double()
    model.reset_classifier(3, "avg")
    assert model.get_classifier() is model.head
    assert model.head.weight.dtype == torch.float64
    assert model(images(2, 3, 32, 32).double()).shape == (2, 3)
    model.reset_classifier(0)
    assert model(images(2, 3, 32, 32).double()).shape == (2, 160)
    with pytest.raises(ValueError, match="num_classes must be 0 or more"):
        model.reset_classifier(-2)


@pytest.mark.parametrize("name", ["softpp_nano", "softpp_vit_small"])
def test_positions_and_class_token_are_not_decayed(name: str) -> None:
    model = build(name)
    spared = model.no_weight_decay()
    assert spared == {
        name
        for name, _ in model.named_parameters()
        if name.split(".")[-1] in ("cls_token", "grid", "prefix")
    }
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    rates = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert (rates[id(parameter)] == 0) == (name in spared or parameter.ndim <= 1)


@pytest.mark.parametrize("name", ["softpp_nano", "softpp_vit_small"])
def test_rates_of_learning_fall_with_depth(name: str) -> None:
    model = build(name)
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, layer_decay=0.5)
    scales = {id(p): g["lr_scale"] for g in optimizer.param_groups for p in g["params"]}
    blocks = model.blocks if "vit" in name else [b for s in model.stages for b in s.blocks]
    first = model.embed.conv if "vit" in name else model.stages[0].embed[0].conv
    order = [first, *(block.mlp.fc1 for block in blocks), model.head]
    found = [scales[id(layer.weight)] for layer in order]
    assert found == sorted(found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", ["softpp_nano", "softpp_vit_small"])
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    model = build(name, sampler="random").train()
    x = images(2, 3, 32, 32)
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(0)
        model(x).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_a_model_without_weights_says_so() -> None:
    with pytest.raises(RuntimeError, match="No pretrained weights exist for softpp_tiny"):
        timm.create_model("softpp_tiny", pretrained=True)


@pytest.mark.parametrize("name", ["softpp_nano", "softx_nano", "softpp_vit_small"])
def test_backbones_can_be_mapped(name: str) -> None:
    """`torch.func.vmap` knows no other order of memory than the usual one."""
    torch.manual_seed(0)
    model, x = timm.create_model(name, img_size=32).eval(), images(2, 1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.vmap(model)(x), torch.stack([model(image) for image in x]), rtol=1e-3, atol=1e-5
        )
