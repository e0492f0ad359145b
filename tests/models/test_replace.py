"""Another attention in timm's models: what is kept, what it costs, and the way back."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import FrozenInstanceError

import pytest
import timm
import torch
from timm.models import checkpoint_seq
from torch import Tensor, nn

from softmaxfree import MultiHeadAttention, register_attention, replace_attention, tie_qk
from softmaxfree.layers.registry import ATTENTIONS
from softmaxfree.models.options import window_ratio
from softmaxfree.models.projections import rename_projections

from ..helpers import relative_error

NAMES = list(ATTENTIONS)


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vit(name: str = "vit_tiny_patch16_224", **arguments: object) -> nn.Module:
    """Two blocks of width 48, on 4 x 4 patches."""
    torch.manual_seed(0)
    small = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.create_model(name, **(small | arguments)).eval()


def deit(**arguments: object) -> nn.Module:
    return vit("deit_tiny_distilled_patch16_224", **arguments)


def swin(**arguments: object) -> nn.Module:
    """Three blocks on maps of 14 x 14 and 7 x 7, the second one with shifted windows."""
    torch.manual_seed(0)
    small = {
        "img_size": 56, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4), "num_classes": 5,
    }  # fmt: skip
    return timm.create_model("swin_tiny_patch4_window7_224", **(small | arguments)).eval()


def beit(**arguments: object) -> nn.Module:
    """With a bias of relative positions in each layer, and no bias of keys."""
    return moved(vit("beit_base_patch16_224", **arguments))


def eva(**arguments: object) -> nn.Module:
    """With rotary positions, and no bias of keys."""
    return moved(vit("eva02_tiny_patch14_224", **({"patch_size": 16} | arguments)))


def swinv2(**arguments: object) -> nn.Module:
    """Three blocks on maps of 16 x 16 and 8 x 8, the second one with shifted windows."""
    torch.manual_seed(0)
    small = {
        "img_size": 64, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4), "num_classes": 5,
    }  # fmt: skip
    return moved(timm.create_model("swinv2_tiny_window8_256", **(small | arguments)).eval())


def moved(model: nn.Module) -> nn.Module:
    """No weight stays at the 0 or 1 that it starts from."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit": vit, "deit": deit, "swin": swin, "beit": beit, "eva": eva, "swinv2": swinv2
}  # fmt: skip
SIDES = {kind: 56 if kind == "swin" else 64 for kind in MODELS}
DEPTHS = {kind: 3 if "swin" in kind else 2 for kind in MODELS}
TIED = ("vit", "deit", "swin")
DROPPED = {
    "swin": ("relative_position_bias_table",),
    "beit": ("relative_position_bias_table",),
    "swinv2": (
        "logit_scale (of cosine similarities)", "cpb_mlp (bias of relative positions)"
    ),
}  # fmt: skip


def layers(model: nn.Module) -> list[MultiHeadAttention]:
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["vit", "deit", "beit", "eva"])
def test_softmax_for_softmax_changes_nothing(kind: str) -> None:
    model, x = MODELS[kind](), images(2, 3, 64, 64)
    if kind == "beit":
        for block in model.blocks:  # what cannot be kept
            block.attn.relative_position_bias_table = None
    expected = model(x)
    report = replace_attention(model, "softmax", measure=False)
    assert (report.layers, report.new, report.dropped) == (2, (), ())
    assert report.kept == ("q", "k", "v", "proj")
    assert relative_error(model(x), expected) < 1e-5


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in TIED for name in NAMES]
    + [(kind, name) for kind in ("beit", "eva", "swinv2") for name in ("softpp", "performer")],
)
def test_every_attention_trains_in_every_model(kind: str, name: str) -> None:
    model, side = MODELS[kind]().train(), SIDES[kind]
    report = replace_attention(model, name, measure=False)
    assert report.layers == len(layers(model)) == DEPTHS[kind]
    logits = model(images(2, 3, side, side))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    for place, parameter in model.named_parameters():
        assert parameter.grad is not None, place
        assert parameter.grad.isfinite().all(), place


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "names",
    [["softmax"], ["softpp"], ["softpp", "performer"], ["softmax", "softpp", "soft"]],
    ids=str,
)
def test_there_and_back_is_where_it_was(kind: str, names: list[str]) -> None:
    model, x = MODELS[kind](), images(2, 3, SIDES[kind], SIDES[kind])
    before, expected = deepcopy(model), model(x)
    for name in names:
        replace_attention(model, name, measure=False)
    report = replace_attention(model, "original", measure=False)
    assert report.layers == DEPTHS[kind]
    assert set(report.kept) >= {"q", "k", "v", "proj"}
    assert not report.new
    assert same_weights(model, before)
    assert str(model) == str(before)
    assert torch.equal(model(x), expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert replace_attention(model, "original", measure=False).layers == 0


@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_kept_through_several_attentions(kind: str) -> None:
    model = MODELS[kind]()
    holders = [module for module in model.modules() if hasattr(module, "attn")]
    before = [deepcopy(holder.attn) for holder in holders]
    report = replace_attention(model, "softpp", measure=False)
    assert report.kept == ("q", "v", "proj")
    assert report.new == ("sampler.weight", "landmark_norm.0.weight", "landmark_norm.0.bias")
    position = DROPPED.get(kind, ())
    assert report.dropped == ("k", *position)
    with torch.no_grad():  # as training does
        for layer in layers(model):
            layer.proj.bias += 1
            layer.v.weight += 1
    report = replace_attention(model, "performer", measure=False)
    assert report.kept == ("q", "k", "v", "proj")
    assert report.dropped == (
        "sampler.weight", "landmark_norm.0.weight", "landmark_norm.0.bias"
    )  # fmt: skip
    report = replace_attention(model, "original", measure=False)
    assert report.kept == ("q", "k", "v", "proj", *position)
    for holder, old in zip(holders, before):
        q, k, v = holder.attn.qkv.weight.chunk(3)
        old_q, old_k, old_v = old.qkv.weight.chunk(3)
        assert torch.equal(q, old_q)
        assert torch.equal(k, old_k)
        assert torch.equal(v, old_v + 1)
        assert torch.equal(holder.attn.proj.weight, old.proj.weight)
        assert torch.equal(holder.attn.proj.bias, old.proj.bias + 1)
        for name, parameter in old.named_parameters():
            if name not in ("qkv.weight", "proj.weight", "proj.bias"):
                assert torch.equal(holder.attn.get_parameter(name), parameter)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_keys_of_queries_that_were_trained_are_a_copy(part: str) -> None:
    for back in ("original", "softmax"):
        model = vit()
        replace_attention(model, "softpp", measure=False)
        with torch.no_grad():
            for layer in layers(model):
                getattr(layer.q, part)[0] += 1
        report = replace_attention(model, back, measure=False)
        assert "k (a copy of q)" in report.kept
        replace_attention(model, "original", measure=False)
        for block in model.blocks:
            for weights in (block.attn.qkv.weight, block.attn.qkv.bias):
                q, k, _ = weights.chunk(3)
                assert torch.equal(q, k)


def test_keys_come_back_as_the_last_attention_that_had_some_left_them() -> None:
    model = vit()
    replace_attention(model, "softmax", measure=False)
    with torch.no_grad():
        for layer in layers(model):
            layer.k.weight += 1
    expected = [layer.k.weight.clone() for layer in layers(model)]
    replace_attention(model, "softpp", measure=False)
    model = deepcopy(model).bfloat16()  # keys follow
    replace_attention(model, "original", measure=False)
    for block, k in zip(model.blocks, expected):
        assert torch.equal(block.attn.qkv.weight.chunk(3)[1], k.bfloat16())


def test_an_attention_with_other_options_keeps_its_own_weights() -> None:
    model = vit()
    replace_attention(model, "soft", num_landmarks=4, value_conv=3, measure=False)
    before = deepcopy(layers(model))
    report = replace_attention(model, "softpp", num_landmarks=4, measure=False)
    assert {"sampler.weight", "landmark_norm.0.weight"} <= set(report.kept)
    assert report.new == ()
    assert report.dropped == ("value_conv.weight",)
    for layer, old in zip(layers(model), before):
        assert torch.equal(layer.sampler.weight, old.sampler.weight)
    # The kernel of the sampler now has another size.
    report = replace_attention(model, "softpp", ratio=4, measure=False)
    assert report.new == ("sampler.weight",)


def test_the_number_of_landmarks_follows_from_the_map() -> None:
    model = vit(img_size=(224, 336))
    replace_attention(model, "softpp", measure=False)
    sampler = layers(model)[0].sampler
    assert (sampler.num_landmarks, sampler.ratio) == (49, window_ratio(14, 49)) == (49, 2)
    replace_attention(model, "softpp", num_landmarks=16, measure=False)
    sampler = layers(model)[0].sampler
    assert (sampler.num_landmarks, sampler.ratio) == (16, 3)
    replace_attention(model, "softpp", ratio=7, sampler="avg", measure=False)
    sampler = layers(model)[0].sampler
    assert (sampler.num_landmarks, sampler.ratio) == (None, 7)
    model = swin()
    replace_attention(model, "softpp", measure=False)
    assert [layer.sampler.ratio for layer in layers(model)] == [2, 2, 1]


@pytest.mark.parametrize("name", NAMES)
def test_images_of_other_sizes_and_shapes(name: str) -> None:
    model = vit(img_size=128, dynamic_img_size=True)
    twin = vit(img_size=128, dynamic_img_size=True)
    replace_attention(model, name, measure=False)
    replace_attention(twin, name, measure=False)
    twin.load_state_dict(model.state_dict())
    wide, tall = images(1, 3, 32, 128), images(1, 3, 128, 32)
    expected = twin(wide)
    model(tall)  # as many tokens, on another grid
    torch.testing.assert_close(model(wide), expected)
    if name == "softmax":
        original = vit(img_size=128, dynamic_img_size=True)
        assert relative_error(model(wide), original(wide)) < 1e-5


def test_models_that_pad_their_images() -> None:
    model = vit(dynamic_img_size=True, dynamic_img_pad=True)
    replace_attention(model, "softpp", measure=False)
    assert model(images(1, 3, 40, 65)).shape == (1, 5)


def test_windows_of_the_grid_are_those_of_the_image() -> None:
    """A value convolution sees rows and columns: on a wrong grid it would give other results."""
    model = vit(img_size=(32, 64), dynamic_img_size=True, pos_embed="none", depth=1)
    replace_attention(model, "softmax", value_conv=3, measure=False)
    (layer,) = layers(model)
    seen = []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    for height, width in [(32, 64), (64, 32), (48, 80)]:
        model(images(1, 3, height, width))
    assert seen == [(2, 4), (4, 2), (3, 5)]


@pytest.mark.parametrize(
    ("arguments", "prefix"),
    [
        ({"class_token": False, "global_pool": "avg"}, 0),
        ({"reg_tokens": 4}, 5),
        ({"qkv_bias": False, "proj_bias": False, "init_values": 0.1}, 1),
        ({"global_pool": "map"}, 1),
    ],
    ids=["no class token", "registers", "no biases", "attention pooling"],
)
def test_kinds_of_vit(arguments: dict[str, object], prefix: int) -> None:
    model, x = vit(**arguments), images(2, 3, 64, 64)
    expected = model(x)
    replace_attention(model, "softmax", measure=False)
    assert [layer.prefix_tokens for layer in layers(model)] == [prefix] * 2
    assert relative_error(model(x), expected) < 1e-5
    replace_attention(model, "softpp", measure=False)
    assert model(x).isfinite().all()
    replace_attention(model, "original", measure=False)
    assert list(model.state_dict()) == list(vit(**arguments).state_dict())


def test_blocks_with_several_attentions() -> None:
    from timm.models.vision_transformer import ParallelThingsBlock

    model, x = vit(block_fn=ParallelThingsBlock), images(2, 3, 64, 64)
    expected = model(x)
    assert replace_attention(model, "softmax", measure=False).layers == 4
    assert relative_error(model(x), expected) < 1e-5


def test_a_swin_sees_its_whole_map() -> None:
    x = images(1, 3, 56, 56).requires_grad_()
    reach = {}
    for name in ("original", "softmax", "softpp"):
        model = swin(depths=(1,), num_heads=(2,))
        replace_attention(model, name, measure=False)
        corner = model.forward_features(x)[0, 0, 0, 0]
        (gradient,) = torch.autograd.grad(corner, x)
        reach[name] = bool(gradient[..., -4:, -4:].abs().sum() > 0)
    assert reach == {"original": False, "softmax": True, "softpp": True}


@pytest.mark.filterwarnings("ignore::UserWarning:timm")  # of how it resizes the bias
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_swin_takes_images_of_other_sizes(kind: str) -> None:
    model = MODELS[kind](strict_img_size=False)
    replace_attention(model, "softpp", measure=False)
    assert model(images(2, 3, 44, 92)).shape == (2, 5)
    model.set_input_size((112, 56), window_size=4)
    assert model(images(2, 3, 112, 56)).shape == (2, 5)
    replace_attention(model, "original", measure=False)
    assert model.layers[0].blocks[0].attn.window_size == (4, 4)
    assert model(images(2, 3, 112, 56)).shape == (2, 5)


def test_maps_of_odd_sides() -> None:
    model = swin(img_size=28, strict_img_size=False)
    replace_attention(model, "linformer", measure=False)
    assert [layer.max_size for layer in layers(model)] == [(7, 7), (7, 7), (4, 4)]
    assert model(images(1, 3, 28, 28)).shape == (1, 5)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "deit"])
def test_models_that_give_features(kind: str) -> None:
    arguments = {"features_only": True, "out_indices": (0, 1)}
    model, x = MODELS[kind](**arguments), images(1, 3, SIDES[kind], SIDES[kind])
    expected = model(x)
    report = replace_attention(model, "softpp", measure=kind in TIED)
    assert report.layers == DEPTHS[kind]
    assert [tuple(f.shape) for f in model(x)] == [tuple(f.shape) for f in expected]
    replace_attention(model, "softmax", measure=False)
    replace_attention(model, "original", measure=False)
    assert model(x)[0].shape == expected[0].shape


def test_features_of_a_swin_in_channels_first() -> None:
    model = swin(features_only=True, out_indices=(0, 1), feature_cls="getter")
    replace_attention(model, "softpp", measure=False)
    assert [m.shape[1:] for m in model(images(1, 3, 56, 56))] == [(24, 14, 14), (48, 7, 7)]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("copy", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_live_on_their_own(kind: str, copy: Callable[[nn.Module], nn.Module]) -> None:
    arguments = {"dynamic_img_size": True} if kind in ("vit", "deit", "eva") else {}
    model, x = MODELS[kind](**arguments), images(1, 3, SIDES[kind], SIDES[kind])
    replace_attention(model, "softpp", measure=False)
    twin = copy(model)
    if arguments:
        model(images(1, 3, 32, 128))  # its grid is not the copy's
    assert torch.equal(twin(x), model(x))
    replace_attention(twin, "original", measure=False)
    assert len(layers(twin)) == 0
    assert len(layers(model)) == DEPTHS[kind]
    assert model(x).shape == twin(x).shape


@pytest.mark.parametrize("kind", MODELS)
def test_state_dicts_round_trip(kind: str) -> None:
    model, x = MODELS[kind](), images(1, 3, SIDES[kind], SIDES[kind])
    replace_attention(model, "softpp", value_conv=3, measure=False)
    torch.manual_seed(1)
    twin = timm_twin(kind)
    replace_attention(twin, "softpp", value_conv=3, measure=False)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))
    others = ("qkv", "relative", "cpb", "logit_scale", "q_bias")
    assert not any(other in name for name in model.state_dict() for other in others)


@pytest.mark.parametrize("kind", MODELS)
def test_weights_find_their_places_in_models_with_another_attention(kind: str) -> None:
    model, x = MODELS[kind](), images(1, 3, SIDES[kind], SIDES[kind])
    saved, own = model.state_dict(), model(x)
    replaced = timm_twin(kind)
    replace_attention(replaced, "softmax", measure=False)
    replaced.load_state_dict(rename_projections(saved, replaced), strict=False)
    replace_attention(model, "softmax", measure=False)
    assert relative_error(replaced(x), model(x)) < 1e-5
    back = MODELS[kind]()  # with the same weights beside the projections
    for name, parameter in back.named_parameters():
        if ".attn.qkv" in name or ".attn.proj" in name or name.endswith(("q_bias", "v_bias")):
            nn.init.zeros_(parameter)
    back.load_state_dict(rename_projections(replaced.state_dict(), back), strict=False)
    assert relative_error(back(x), own) < 1e-5


def timm_twin(kind: str) -> nn.Module:
    """A model whose weights are others."""
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    return model


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_precision_mode_and_frozen_weights_are_kept(kind: str) -> None:
    model = MODELS[kind]().bfloat16().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("qkv" not in name)
    report = replace_attention(model, "softpp")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert report.after.memory
    assert all(module.training for module in model.modules())
    for layer in layers(model):
        assert not layer.q.weight.requires_grad
        assert not layer.v.bias.requires_grad
        assert layer.proj.weight.requires_grad
        assert layer.sampler.weight.requires_grad
    model.float().eval()
    replace_attention(model, "original", measure=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("qkv" not in name)


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_dropout_of_the_projection_stays(kind: str) -> None:
    model = MODELS[kind](proj_drop_rate=0.5, attn_drop_rate=0.1)
    report = replace_attention(model, "softmax", measure=False)
    assert "dropout of attention weights" in report.dropped
    x = images(1, 3, SIDES[kind], SIDES[kind])
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_gradient_checkpointing_with_images_of_several_sizes() -> None:
    model = vit(dynamic_img_size=True).train()
    replace_attention(model, "softpp", measure=False)
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        loss = model(images(1, 3, 64, 64)).sum() + model(images(1, 3, 32, 64)).sum()
        loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checkpointed in zip(*found):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_gradient_checkpointing_with_two_grids_of_as_many_tokens(
    reentrant: bool, every: int
) -> None:
    model = vit(img_size=128, dynamic_img_size=True, depth=3).train()
    replace_attention(model, "softpp", ratio=2, value_conv=3, measure=False)

    def logits(x: Tensor, checkpointing: bool) -> Tensor:
        if not checkpointing:
            return model(x)
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(x)))
        tokens = checkpoint_seq(model.blocks, tokens, every, use_reentrant=reentrant)
        return model.forward_head(model.norm(tokens))

    found = []
    for checkpointing in (False, True):
        model.zero_grad()
        wide = logits(images(1, 3, 32, 128), checkpointing)
        tall = logits(images(1, 3, 128, 32), checkpointing)
        (wide.sum() + tall.square().sum()).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checkpointed in zip(*found):
        torch.testing.assert_close(plain, checkpointed)


def test_gradients_of_single_images_by_torch_func() -> None:
    model, x = vit(), images(2, 3, 64, 64)
    replace_attention(model, "softpp", measure=False)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, image[None]).sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    together = torch.func.grad(lambda w: loss(w, x[0]) + loss(w, x[1]))(weights)
    for name, gradient in together.items():
        torch.testing.assert_close(found[name].sum(0), gradient, rtol=1e-4, atol=1e-5)


def test_compiled_models() -> None:
    model = vit(dynamic_img_size=True, depth=1)
    replace_attention(model, "softpp", measure=False)
    compiled = torch.compile(model, backend="eager")
    for size in [(32, 96), (96, 32)]:
        x = images(1, 3, *size)
        torch.testing.assert_close(compiled(x), model(x))


def test_the_reports_numbers() -> None:
    model = vit(img_size=256, patch_size=8)  # 1024 tokens
    parameters = count(model)
    report = replace_attention(model, "softpp")
    assert report.before.parameters == parameters
    assert report.after.parameters == count(model)
    # Keys are gone; a kernel of 4 x 4 for 7 x 7 of 32 x 32 tokens, and a normalisation, are new.
    assert report.after.parameters - parameters == 2 * (4**2 * 16**2 + 2 * 16 - 48 * 49)
    assert report.after.multiply_adds < report.before.multiply_adds
    again = replace_attention(model, "original")
    assert again.before == report.after
    assert again.after == report.before


def test_multiply_adds_of_softmax_are_counted_whole() -> None:
    """timm's fused attention, and ours, on 17 tokens."""
    n, dim, hidden = 17, 48, 192
    blocks = 2 * (n * dim * (4 * dim + 2 * hidden) + 2 * n * n * dim)
    expected = 16 * dim * 3 * 16**2 + blocks + dim * 5
    report = replace_attention(vit(), "softmax")
    assert report.before.multiply_adds == report.after.multiply_adds == expected


def test_measuring_changes_nothing() -> None:
    model = vit().train()
    model.blocks[0].eval()
    replace_attention(model, "performer", redraw=1, measure=False)  # drawn anew at every step
    twin = deepcopy(model)
    states = []
    for each, measure in ((model, True), (twin, False)):
        torch.manual_seed(0)
        replace_attention(each, "performer", redraw=1, measure=measure)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert same_weights(model, twin)
    assert "blocks.0.attn.layer.projection" in model.state_dict()
    for module, other in zip(model.modules(), twin.modules(), strict=True):
        assert module.training == other.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_report_is_a_table_that_fits_a_terminal() -> None:
    report = replace_attention(swin(), "spatial_reduction", value_conv=3)
    lines = str(report).splitlines()
    assert lines[0] == "attention 'spatial_reduction' in 3 layers"
    assert [line.split("  ")[0] for line in lines[2:5]] == [
        "parameters", "multiply-adds", "memory of an image"
    ]  # fmt: skip
    assert max(map(len, lines)) <= 80
    assert lines[5] == "kept:    q, k, v, proj"
    assert lines[-1] == "dropped: relative_position_bias_table"
    with pytest.raises(FrozenInstanceError):
        report.layers = 0  # type: ignore[misc]
    short = replace_attention(swin(), "softmax", measure=False)
    assert short.after.multiply_adds is short.after.memory is None
    assert "memory" not in str(short)


def test_an_attention_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softmaxfree.layers.registry.ATTENTIONS", dict(ATTENTIONS))

    @register_attention("average")
    class AverageAttention(MultiHeadAttention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
            return v.mean(-2, keepdim=True).expand_as(q)

    model = vit()
    report = replace_attention(model, "average")
    assert report.kept == ("q", "v", "proj")
    assert model(images(2, 3, 64, 64)).shape == (2, 5)


@pytest.mark.parametrize("name", ["convnext_atto", "softpp_nano"])
@pytest.mark.parametrize("function", [lambda m: replace_attention(m, "softpp"), tie_qk])
def test_other_models_are_refused(name: str, function: Callable[[nn.Module], object]) -> None:
    model = timm.create_model(name, device="meta")
    with pytest.raises(ValueError, match=r"is for timm's ViT, .* nn.MultiheadAttention, got "):
        function(model)


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        (lambda: beit(use_shared_rel_pos_bias=True), "softpp", "use_shared_rel_pos_bias=False"),
        (lambda: eva(scale_attn_inner=True), "softpp", "without .* scale_attn_inner"),
        (lambda: eva(patch_drop_rate=0.5), "softpp", "build it with patch_drop_rate=0"),
        (
            lambda: eva(attn_type="rope", qkv_fused=False, num_heads=4, num_kv_heads=2),
            "softpp", "width of the tokens, 48, got 24 .* as many heads of keys",
        ),
        (eva, "spatial_reduction", "keys on a smaller grid than queries"),
    ],
    ids=["shared bias", "inner norm", "patches dropped", "fewer keys", "reduced keys"],
)  # fmt: skip
def test_what_beit_and_eva_cannot_hold(
    model: Callable[[], nn.Module], name: str, reason: str
) -> None:
    refused = model()
    before = deepcopy(refused)
    with pytest.raises(ValueError, match=reason):
        replace_attention(refused, name)
    assert same_weights(refused, before)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["eva", "rope"])
def test_kinds_of_eva(kind: str, fused: bool) -> None:
    """Projections in one or three layers; a half of each head turned, or pairs of channels."""
    model = eva(attn_type=kind, qkv_fused=fused, rope_rotate_half=fused, num_reg_tokens=2)
    x, before = images(2, 3, 64, 64), deepcopy(model)
    expected = model(x)
    replace_attention(model, "softmax", measure=False)
    assert relative_error(model(x), expected) < 1e-5
    replace_attention(model, "softpp", measure=False)
    assert relative_error(model(x), expected) > 1e-3
    replace_attention(model, "original", measure=False)
    assert same_weights(model, before)
    assert torch.equal(model(x), expected)


def test_a_replaced_eva_still_tells_positions_apart() -> None:
    """Without rotary positions the result would only follow the tokens when they are moved."""
    model, x = eva(use_abs_pos_emb=False), images(1, 3, 64, 64)
    replace_attention(model, "gaussian", measure=False)
    moved_image = x.roll(16, -1)
    pooled = model.forward_features(x).mean(1), model.forward_features(moved_image).mean(1)
    assert relative_error(*pooled) > 1e-4
    model.rope = None
    pooled = model.forward_features(x).mean(1), model.forward_features(moved_image).mean(1)
    assert relative_error(*pooled) < 1e-5


@pytest.mark.parametrize("kind", ["beit", "eva", "swinv2"])
def test_results_do_not_depend_on_batch_mates(kind: str) -> None:
    model, x = MODELS[kind](), images(3, 3, 64, 64)
    replace_attention(model, "softpp", measure=False)
    alone = model(x[:1])
    x[1:] = 1e3  # other images
    assert relative_error(model(x)[:1], alone) < 1e-5


@pytest.mark.parametrize("kind", ["beit", "eva", "swinv2"])
def test_keys_without_a_bias_stay_without(kind: str) -> None:
    model = MODELS[kind]()
    replace_attention(model, "softpp", measure=False)
    with torch.no_grad():
        for layer in layers(model):
            layer.q.weight += 1  # as training does: keys are now a copy
    replace_attention(model, "softmax", measure=False)
    assert all(layer.k.bias is None for layer in layers(model))
    expected = MODELS[kind]()
    replace_attention(model, "original", measure=False)
    assert list(model.state_dict()) == list(expected.state_dict())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"qk_norm": True}, "has q_norm, .* without qk_norm"),
        ({"scale_attn_norm": True}, "has norm, .* without scale_attn_norm"),
        ({"patch_drop_rate": 0.5}, "build it with patch_drop_rate=0"),
        ({"attn_layer": "diff"}, "Block has no attention of the usual kind"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_vits_with_other_attention_are_refused(arguments: dict[str, object], reason: str) -> None:
    model = vit(**arguments)
    before = deepcopy(model)
    with pytest.raises(ValueError, match=reason):
        replace_attention(model, "softpp")
    assert same_weights(model, before)


def test_heads_of_another_width_are_refused() -> None:
    model = swin(head_dim=16)
    for function in (tie_qk, lambda m: replace_attention(m, "softpp")):
        with pytest.raises(ValueError, match="the width of the tokens, 24, got 32"):
            function(model)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("softermax", {}, "unknown attention 'softermax'"),
        (
            "softmax",
            {"num_landmarks": 49},
            "attention 'softmax' has no num_landmarks; leave it out, or choose",
        ),
        ("softpp", {"prefix_tokens": 2}, "prefix_tokens follows from the model"),
        ("softmax", {"qkv_bias": False}, "qkv_bias follows from the model"),
        ("soft", {"normalize": True}, "normalize is what tells softpp from soft"),
        ("softpp", {"num_landmarks": 50}, "num_landmarks must be a square number"),
        (
            "original",
            {"num_landmarks": 49},
            "the original attention has no options; leave out num_landmarks",
        ),
    ],
    ids=["name", "option", "model's", "weights'", "name's", "value", "original"],
)
def test_what_is_refused_changes_nothing(
    name: str, options: dict[str, object], reason: str
) -> None:
    for model in (vit(), swin()):
        before = deepcopy(model)
        with pytest.raises(ValueError, match=reason):
            replace_attention(model, name, **options)
        assert same_weights(model, before)
        assert str(model) == str(before)


def test_masks_are_refused() -> None:
    model, x = vit(), images(1, 3, 64, 64)
    replace_attention(model, "softpp", measure=False)
    with pytest.raises(ValueError, match="takes no attn_mask and no is_causal"):
        model.forward_features(x, attn_mask=torch.zeros(17, 17))
    with pytest.raises(ValueError, match="takes no attn_mask and no is_causal"):
        model.forward_features(x, is_causal=True)


@pytest.mark.parametrize("kind", TIED)
def test_tied_queries_are_keys(kind: str) -> None:
    model, x = MODELS[kind](), images(2, 3, SIDES[kind], SIDES[kind])
    attentions = [module.attn for module in model.modules() if hasattr(module, "attn")]
    before = [deepcopy(attention) for attention in attentions]
    parameters, saved = count(model), 0
    assert tie_qk(model) is model
    for attention, old in zip(attentions, before):
        dim = attention.proj.in_features
        saved += dim * dim + dim
        tokens = images(2, 49, dim)
        q, k, v = attention.qkv(tokens).chunk(3, -1)
        old_q, _, old_v = old.qkv(tokens).chunk(3, -1)
        assert torch.equal(q, k)
        torch.testing.assert_close(q, old_q)
        torch.testing.assert_close(v, old_v)
    assert count(model) == parameters - saved
    model.train()(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", TIED)
def test_tied_models_as_if_keys_were_copies(kind: str) -> None:
    model, x = MODELS[kind](), images(2, 3, SIDES[kind], SIDES[kind])
    copied = deepcopy(model)
    with torch.no_grad():
        for module in copied.modules():
            if hasattr(module, "qkv"):
                for weights in (module.qkv.weight, module.qkv.bias):
                    q, k, _ = weights.chunk(3)
                    k.copy_(q)
    assert relative_error(tie_qk(model)(x), copied(x)) < 1e-5
    other = tie_qk(timm_twin(kind))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert torch.equal(deepcopy(model)(x), model(x))


def test_sizes_of_the_papers_symmetric_models() -> None:
    for name, millions in {"vit_small_patch16_224": (22.05, 20.28),
                           "swin_tiny_patch4_window7_224": (28.29, 26.13)}.items():  # fmt: skip
        model = timm.create_model(name, device="meta")
        found = [count(model), count(tie_qk(model))]
        assert tuple(round(number / 1e6, 2) for number in found) == millions


def test_a_tied_model_stays_tied() -> None:
    model, x = tie_qk(vit()), images(2, 3, 64, 64)
    before, expected = deepcopy(model), model(x)
    report = replace_attention(model, "softmax", measure=False)
    assert (report.kept, report.new, report.dropped) == (("q", "v", "proj"), (), ())
    assert relative_error(model(x), expected) < 1e-5
    replace_attention(model, "original", measure=False)
    assert same_weights(model, before)
    replace_attention(model, "softmax", tie_qk=False, measure=False)
    replace_attention(model, "original", measure=False)
    assert list(model.state_dict()) == list(vit().state_dict())
    assert relative_error(model(x), expected) < 1e-5


def test_what_cannot_be_tied() -> None:
    with pytest.raises(ValueError, match="tied already"):
        tie_qk(tie_qk(vit()))
    with pytest.raises(ValueError, match=r"has q_norm, .* without qk_norm"):
        tie_qk(vit(qk_norm=True))
    model = vit()
    replace_attention(model, "softpp", measure=False)
    with pytest.raises(ValueError, match="pass tie_qk=True to replace_attention"):
        tie_qk(model)
    with pytest.raises(ValueError, match="tie_qk is for timm's ViT, DeiT and Swin; in this model"):
        tie_qk(beit())
