"""The backbones: sizes, arguments, images of any size, independence of batch-mates."""

import pytest
import timm
import torch
from torch import Tensor, nn

from softmaxfree.layers.attention import SoftmaxFreeAttention
from softmaxfree.layers.gaussian import GaussianAttention
from softmaxfree.layers.multihead import MultiHeadAttention
from softmaxfree.layers.samplers import SAMPLERS
from softmaxfree.layers.softmax import SoftmaxAttention
from softmaxfree.models.backbone import ConvPosition

from ..helpers import relative_error

SIZES = ["tiny", "small", "medium", "large"]
FUDAN = [f"{size}_fudan" for size in [*SIZES, "huge"]]
NAMES = [f"{a}_{s}" for a in ("soft", "softpp") for s in ["nano", *SIZES, *FUDAN, "vit_small"]]
NAMES += [f"softx_{size}" for size in ["nano", *SIZES]]


def build(name: str = "softpp_nano", **arguments: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **{"num_classes": 7, **arguments}).eval()


def images(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def attentions(model: nn.Module) -> list[MultiHeadAttention]:
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


def parameters(name: str, **arguments: object) -> int:
    model = timm.create_model(name, device="meta", **arguments)
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_family_is_registered() -> None:
    assert set(timm.list_models("soft*")) == set(NAMES)
    for name in NAMES:
        assert timm.get_pretrained_cfg(name).tag == "untrained"


@pytest.mark.parametrize("attention", ["soft", "softpp"])
def test_numbers_of_parameters(attention: str) -> None:
    assert parameters(f"{attention}_tiny_fudan") == 13_069_056
    for size, millions in {
        "tiny": 14.93, "small": 27.20, "medium": 48.40, "large": 85.19, "small_fudan": 38.86,
        "medium_fudan": 45.81, "large_fudan": 64.70, "huge_fudan": 87.11,
    }.items():  # fmt: skip
        assert round(parameters(f"{attention}_{size}") / 1e6, 2) == millions
    assert parameters(f"{attention}_nano") <= 1_200_000


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_papers_table_of_samplers(sampler: str) -> None:
    expected = 13.07 if sampler == "conv" else 12.96
    assert round(parameters("soft_tiny_fudan", sampler=sampler) / 1e6, 2) == expected


def test_released_models_invert_as_they_were_trained() -> None:
    for name, inverse in (("soft_tiny_fudan", "damped"), ("softpp_tiny_fudan", "backtrack")):
        *soft, softmax, last = attentions(timm.create_model(name, device="meta"))
        assert {layer.inverse for layer in soft} == {inverse}
        assert isinstance(softmax, SoftmaxAttention)
        assert isinstance(last, SoftmaxAttention)
    for name in ("soft_tiny", "softpp_tiny"):
        assert {a.inverse for a in attentions(timm.create_model(name, device="meta"))} == {"auto"}


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (33, 47), (97, 31), (16, 200)], ids=str)
@pytest.mark.parametrize(
    "name", ["soft_nano", "softpp_nano", "softx_nano", "softpp_tiny", "softpp_vit_small"]
)
def test_any_size(name: str, size: tuple[int, int]) -> None:
    model = build(name)
    with torch.no_grad():
        logits = model(images(1, 3, *size))
    assert logits.shape == (1, 7)
    assert logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "size"),
    [
        ("softpp_tiny_fudan", {"inverse": "auto"}, (800, 1333)),
        ("softpp_tiny", {"num_landmarks": 49}, (1024, 2048)),
    ],
)
def test_large_images(name: str, arguments: dict[str, object], size: tuple[int, int]) -> None:
    model = build(name, **arguments)
    with torch.no_grad():
        maps = model.forward_intermediates(images(1, 3, *size), intermediates_only=True)
    for features, stride in zip(maps, (4, 8, 16, 32)):
        assert features.shape[2:] == tuple(-(-side // stride) for side in size)
        assert features.isfinite().all()


def test_positions_are_resized() -> None:
    """At the size they are learned for they are added as they are; a constant stays one."""
    model = build()
    position = model.stages[0].position
    x = torch.zeros(1, 256, 32)
    assert torch.equal(position(x, (16, 16)), position.grid.flatten(1, 2))
    nn.init.constant_(position.grid, 0.5)
    torch.testing.assert_close(
        position(torch.zeros(1, 20 * 31, 32), (20, 31)).mean(), torch.tensor(0.5)
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("softpp_nano", {}),
        ("soft_nano", {"inverse": "damped"}),
        ("softpp_nano", {"inverse": "backtrack", "stage4": "softmax"}),
        ("softpp_nano", {"num_landmarks": 16, "sampler": "random"}),
        ("softx_nano", {}),
        ("softpp_vit_small", {"depth": 3}),
    ],
    ids=str,
)
def test_an_image_gives_the_same_alone_and_in_any_batch(
    name: str, arguments: dict[str, object]
) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = build(name, dtype=dtype, **arguments)
        x = images(4, 3, 64, 64, dtype=dtype)
        x[1] = 1.0  # a constant image
        x[2] *= 100
        with torch.no_grad():
            together = model(x)
            for i in range(4):
                assert relative_error(together[i], model(x[i : i + 1])[0]) < tolerance
            shuffled = model(x[[3, 1, 0]])
        assert relative_error(shuffled[0], together[3]) < tolerance


@pytest.mark.parametrize("name", ["softpp_nano", "softpp_vit_small"])
@pytest.mark.parametrize("attention", ["soft", "softpp", "softmax", "gaussian"])
def test_attention_changes_all_stages(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    kinds = {type(layer).__name__ for layer in attentions(model)}
    assert len(kinds) == 1
    assert {a.normalize for a in attentions(model) if hasattr(a, "normalize")} == {
        "soft": {False}, "softpp": {True}, "gaussian": {True}
    }.get(attention, set())  # fmt: skip
    loss = model.train()(images(2, 3, 64, 64)).square().sum()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_stage4_changes_the_last_alone() -> None:
    for stage4, kind in (("softmax", SoftmaxAttention), ("gaussian", GaussianAttention)):
        *first, last = attentions(build(stage4=stage4))
        assert isinstance(last, kind)
        assert not any(isinstance(layer, kind) for layer in first)
    # and not where all of them are changed
    *_, last = attentions(build(attention="gaussian"))
    assert isinstance(last, GaussianAttention)
    *_, last = attentions(build(attention="gaussian", stage4="softmax"))
    assert isinstance(last, SoftmaxAttention)


def test_tie_qk() -> None:
    for attention, usual in (("softpp", True), ("gaussian", True), ("softmax", False)):
        assert {a.tie_qk for a in attentions(build(attention=attention))} == {usual}
        model = build(attention=attention, tie_qk=not usual)
        assert {a.tie_qk for a in attentions(model)} == {not usual}
        model.train()(images(2, 3, 32, 32)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


SHALLOW = {"depths": (1, 1, 1, 1)}


def landmarks(model: nn.Module, *size: int) -> list[int]:
    """How many landmarks the layers make of an image, the class token included."""
    found: list[int] = []
    for module in model.modules():
        if isinstance(module, SoftmaxFreeAttention):
            module.landmark_norm.register_forward_hook(lambda *call: found.append(call[2].shape[2]))
    with torch.no_grad():
        model(images(1, 3, *size))
    return found


@pytest.mark.parametrize("number", [36, 49, 64, 81])
def test_the_number_of_landmarks_is_the_same_in_every_stage_and_at_every_size(number: int) -> None:
    model = build("softpp_tiny", num_landmarks=number, **SHALLOW)
    assert landmarks(model, 288, 320) == [number, number, number, number + 1]


def test_journal_models_have_49_landmarks_by_default() -> None:
    for name in ("soft_tiny", "softpp_tiny"):
        assert landmarks(build(name, **SHALLOW), 288, 320) == [49, 49, 49, 50]
    assert landmarks(build("softpp_vit_small", depth=1), 320, 352) == [50]
    assert landmarks(build("softx_tiny", **SHALLOW), 288, 320) == [49, 49, 49, 49]
    assert landmarks(build("softx_nano"), 64, 64) == [16] * 5


def test_released_and_nano_models_keep_their_ratios() -> None:
    """At 256 pixels a window of 8 tokens of stage 1 makes 8 x 8 landmarks."""
    assert landmarks(build("softpp_tiny_fudan", **SHALLOW), 256, 256)[:3] == [64, 64, 64]
    assert landmarks(build("softpp_nano"), 64, 64) == [64, 64, 64, 64, 17]


@pytest.mark.parametrize("name", ["softpp_tiny", "softpp_tiny_fudan", "softx_nano"])
def test_ratios_and_numbers_of_landmarks_replace_each_other(name: str) -> None:
    by_ratio = build(name, ratios=(8, 4, 2, 1), **SHALLOW)
    assert landmarks(by_ratio, 256, 256)[0] in (64, 256)  # of 64 x 64 tokens, or 128 x 128
    by_number = build(name, num_landmarks=16, **SHALLOW)
    assert landmarks(by_number, 256, 256)[:3] == [16, 16, 16]
    both = build(name, ratios=(4, 4, 2, 1), num_landmarks=16, **SHALLOW)
    assert landmarks(both, 256, 256)[:3] == [16, 16, 16]
    assert both.stages[0].blocks[0].attention.sampler.ratio == 4


def test_49_landmarks_at_224_are_the_ratios_with_the_same_weights() -> None:
    ratios, number = (
        build("softpp_tiny", ratios=(8, 4, 2, 1), **SHALLOW),
        build("softpp_tiny", **SHALLOW),
    )
    number.load_state_dict(ratios.state_dict())
    x, larger = images(1, 3, 224, 224), images(1, 3, 288, 288)
    with torch.no_grad():
        assert relative_error(number(x), ratios(x)) < 1e-5
        assert relative_error(number(larger), ratios(larger)) > 1e-3


def test_weights_fit_models_of_all_image_sizes() -> None:
    """Also convolutions that make landmarks, whose windows could follow the size."""
    for name, arguments in (("softpp_tiny", SHALLOW), ("softx_nano", {})):
        weights = build(name, **arguments).state_dict()
        for size in (64, 384):
            build(name, img_size=size, **arguments).load_state_dict(weights)


def test_inverse_iterations_and_ridge_reach_every_layer() -> None:
    model = build("soft_nano", inverse="newton", iters=7, ridge=0.5)
    for layer in attentions(model):
        assert (layer.inverse, layer.iters, layer.ridge) == ("newton", 7, 0.5)


def test_value_convolutions_can_be_changed_and_left_out() -> None:
    usual, none, three = build(), build(value_conv=0), build(value_conv=(3, 3, 3, 3))
    assert [getattr(a.value_conv, "weight", None) is None for a in attentions(usual)] == [
        False, False, False, False, True
    ]  # fmt: skip
    assert all(a.value_conv is None for a in attentions(none))
    assert {a.value_conv.weight.shape[-1] for a in attentions(three)} == {3}


def test_patches_need_not_overlap() -> None:
    overlapping, not_overlapping = build(), build(overlap=False)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in not_overlapping.modules())
    assert any(isinstance(m, nn.BatchNorm2d) for m in overlapping.modules())
    for model in (overlapping, not_overlapping):
        sizes = [m.shape[2:] for m in model.forward_intermediates(images(1, 3, 33, 47))[1]]
        assert sizes == [(17, 24), (9, 12), (5, 6), (3, 3)]


def test_stochastic_depth_drops_branches_of_whole_samples_in_training_alone() -> None:
    model, plain = build(drop_path_rate=0.9), build()
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for s in model.stages for block in s.blocks]
    assert rates == pytest.approx([0.0, 0.225, 0.45, 0.675, 0.9])
    plain.load_state_dict(model.state_dict())
    x = images(1, 3, 32, 32)
    assert torch.equal(model(x), plain(x))
    block = model.stages[3].blocks[0].train()
    tokens = images(64, 5, 160)
    unchanged = (block(tokens, (2, 2)) == tokens).flatten(1).all(1)
    assert 40 <= unchanged.sum() < 64  # 0.9^2 of them lose both branches


def test_heads_and_channels() -> None:
    x = images(2, 4, 40, 40)
    model = build(in_chans=4)
    tokens = model.forward_features(x)
    assert tokens.shape == (2, 1 + 3 * 3, 160)
    torch.testing.assert_close(model(x), model.forward_head(tokens))
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
    average = build(in_chans=4, global_pool="avg", num_classes=0)
    average.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(average(x), tokens[:, 1:].mean(1))
    assert build(in_chans=4, global_pool="", num_classes=0)(x).shape == tokens.shape


def test_img_size_sets_the_grids() -> None:
    model = build("softpp_tiny", img_size=(160, 97), depths=(1, 1, 1, 1))
    grids = [tuple(stage.position.grid.shape[1:3]) for stage in model.stages]
    assert grids == [(40, 25), (20, 13), (10, 7), (5, 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"attention": "relu"},
            "unknown attention 'relu'; choose one of soft, softpp, softx, softmax",
        ),
        ({"stage4": "relu"}, "stage4 must be one of soft, softmax, gaussian, got 'relu'"),
        (
            {"attention": "softmax", "sampler": "avg"},
            "attention 'softmax' has no sampler; leave it out, or choose one of soft, softpp",
        ),
        ({"attention": "gaussian", "inverse": "newton"}, "attention 'gaussian' has no inverse"),
        ({"sampler": "max"}, "unknown sampler 'max'"),
        ({"inverse": "svd"}, "unknown method 'svd'"),
        ({"num_landmarks": 50}, "num_landmarks must be a square number for images, got 50"),
        ({"embed_dims": (64, 128)}, r"embed_dims must be 4 numbers, 1 or more, got \(64, 128\)"),
        ({"depths": (1, 1, 0, 1)}, "depths must be 4 numbers, 1 or more"),
        ({"num_heads": (3, 3, 3, 3)}, "num_heads must divide dim, got dim=32, num_heads=3"),
        ({"value_conv": 4}, "value_conv must be an odd size or None, got 4"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be at least 0 and below 1, got 1.0"),
        ({"global_pool": "max"}, "global_pool must be one of 'token', 'avg', '', got 'max'"),
        ({"class_token": False}, "global_pool='token' needs a class token, and the model has none"),
        ({"in_chans": 0}, "in_chans must be at least 1, got 0"),
        ({"num_classes": -1}, "num_classes must be 0 or more, got -1"),
        ({"img_size": 0}, "img_size must be a side or"),
        ({"act_layer": "relu"}, "act_layer must be one of gelu, gelu_tanh, got 'relu'"),
        ({"stem_stride": 3}, "stem_stride must be 4 or 2, got 3"),
        ({"position": "none"}, "position must be one of learned, conv, got 'none'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)


@pytest.mark.parametrize("name", ["soft_nano", "soft_vit_small"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        *(
            ({name: value}, f"{name} in attention_options is set by an argument .*; pass {name}")
            for name, value in {
                "tie_qk": True, "num_landmarks": 16, "ridge": 0.1, "value_conv": 3, "ratio": 1,
                "sampler": "avg", "inverse": None, "iters": 3, "pad": "drop",
            }.items()
        ),
        *(
            ({name: value}, f"{name} follows from the model; leave it out")
            for name, value in {"ndim": 1, "prefix_tokens": 2, "max_size": (9, 9)}.items()
        ),
        ({"normalize": True}, "normalize is what tells softpp from soft, .* is 'soft'"),
        ({"features": 64}, "attention 'soft' has no features; leave it out, or choose"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_options_that_are_set_elsewhere_are_refused(
    name: str, option: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, attention_options=option)


def test_positions_by_convolution() -> None:
    """Inside, a shifted image is a shifted map; learned positions do not follow it."""
    model = build(position="conv")
    assert not any("position.grid" in name for name, _ in model.named_parameters())
    assert model(images(2, 3, 44, 36)).shape == (2, 7)
    tokens, size = images(1, 1 + 8 * 8, 5), (8, 8)
    position = ConvPosition(5, prefix_tokens=1)
    grid = tokens[:, 1:].unflatten(1, size)
    shifted = torch.cat([tokens[:, :1], grid.roll(1, 2).flatten(1, 2)], 1)
    with torch.no_grad():
        one, other = position(tokens, size), position(shifted, size)
    assert torch.equal(one[:, 0], tokens[:, 0])  # the class token has no place
    one, other = (x[:, 1:].unflatten(1, size) for x in (one, other))
    torch.testing.assert_close(one[:, :, 1:-2], other[:, :, 2:-1])
    assert (one[:, :, 0] - other[:, :, 1]).abs().max() > 1e-4  # the margins tell where they are


def test_options_of_an_attention_alone() -> None:
    model = build(attention_options={"landmark_norm": False, "qkv_bias": False})
    assert all(isinstance(a.landmark_norm, nn.Identity) for a in attentions(model))
    assert all(a.q.bias is None for a in attentions(model))
    model = build(attention="gaussian", attention_options={"normalize": False})
    assert not any(a.normalize for a in attentions(model))


def test_bad_images_are_named() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"images must be \(B, 3, H, W\), got shape \(3, 32, 32\)"):
        model(images(3, 32, 32))
    with pytest.raises(ValueError, match=r"must have 3 channels, got shape .*in_chans=4 for these"):
        model(images(1, 4, 32, 32))
    with pytest.raises(ValueError, match=r"floating-point type, got torch.uint8; normalise them"):
        model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="images are empty"):
        model(images(0, 3, 32, 32))
    with pytest.raises(ValueError, match=r"every side must be at least the ratio 8.*'replicate'"):
        build("soft_tiny_fudan")(images(1, 3, 24, 24))
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW', got 'NHWC'"):
        model.forward_intermediates(images(1, 3, 32, 32), output_fmt="NHWC")
