"""Weights from files: the authors', ours, other people's, broken ones."""

import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn

from softmaxfree.errors import UserError
from softmaxfree.models.checkpoints import read_checkpoint
from softmaxfree.models.convert import convert
from softmaxfree.models.weights import find_weights
from softmaxfree.tasks.warm_start import initialise

from .test_backbones import build, images

MINI = {"embed_dims": (32, 64, 96, 128), "depths": (1, 1, 2, 1)}


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A file as the authors write it: a small model under their names."""
    model = build("soft_tiny_fudan", **MINI)
    path = tmp_path / "released.pth"
    torch.save({"state_dict": to_released(model.state_dict()), "epoch": 3}, path)
    return path


def to_released(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of the renaming, written down once more."""
    modules = {
        "attention.q": "att.mha.W_q", "attention.v": "att.mha.W_v", "attention.proj": "att.mha.ff",
        "attention.sampler": "att.mha.attn.Qlandmark_op",
        "attention.landmark_norm.0": "att.mha.attn.Qnorm_act.0",
        "attention.value_conv": "att.mha.attn.conv", "norm1": "att.norm1", "norm2": "att.norm2",
        "mlp.fc1": "att.ff1", "mlp.fc2": "att.ff2",
    }  # fmt: skip
    found = {}
    for key, tensor in state.items():
        if key.startswith(("norm.", "head.")):
            found[key] = tensor
            continue
        _, i, part, *rest = key.split(".")
        stage = int(i) + 1
        if part == "cls_token":
            found["cls_token"] = tensor
        elif part == "embed":
            unit, layer, leaf = rest
            place = 3 * int(unit) + (layer == "bn")
            found[f"patch_embed{stage}.proj.{place}.{leaf}"] = tensor
        elif part == "position" and rest == ["grid"]:
            prefix = state.get(f"stages.{i}.position.prefix")
            grid = tensor.flatten(1, 2)
            found[f"pos_embed{stage}"] = grid if prefix is None else torch.cat([prefix, grid], 1)
        elif part == "blocks":
            block, module, leaf = f"block{stage}.{rest[0]}", ".".join(rest[1:-1]), rest[-1]
            if stage < 4:
                found[f"{block}.{modules[module]}.{leaf}"] = tensor
            elif module == "attention.k":
                value = state[key.replace("attention.k", "attention.v")]
                found[f"{block}.attn.kv.{leaf}"] = torch.cat([tensor, value])
            elif module != "attention.v":
                found[f"{block}.{module.replace('attention', 'attn')}.{leaf}"] = tensor
    return found


def test_a_released_file_is_loaded_and_converted(released: Path, tmp_path: Path) -> None:
    expected = build("soft_tiny_fudan", **MINI)
    target = tmp_path / "converted.safetensors"
    found = convert(released, target)
    assert found.arguments == {
        "img_size": 224, "in_chans": 3, "num_classes": 7, "embed_dims": (32, 64, 96, 128),
        "depths": (1, 1, 2, 1), "num_heads": (1, 2, 3, 4), "ratios": (8, 4, 2, 1),
        "value_conv": (9, 5, 3, 0), "stage4": "softmax",
    }  # fmt: skip
    x = images(1, 3, 64, 64)
    known = find_weights(target)
    assert torch.equal(known.build()(x), expected(x))
    assert (known.preparation.size, len(known.classes)) == (224, 7)
    for path in (released, target):
        model = timm.create_model(
            "soft_tiny_fudan", **MINI, num_classes=7, checkpoint_path=path
        ).eval()
        assert torch.equal(model(x), expected(x))


def test_a_registered_size_is_recognised(tmp_path: Path) -> None:
    for name in ("softpp_nano", "softpp_tiny", "softpp_tiny_fudan"):
        variant = name.removeprefix("softpp_")
        model = timm.create_model(name)
        source, target = tmp_path / f"{name}.pth", tmp_path / f"{name}.safetensors"
        torch.save(model.state_dict(), source)
        found = convert(source, target, "softpp")
        assert found.variant == variant
        assert found.call("softpp", target) == (
            f'timm.create_model("{name}", checkpoint_path="{target}")'
        )
        assert found.arguments["img_size"] == model.default_cfg["input_size"][-1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_heads": (1, 2, 4, 5)},
        {"tie_qk": False},
        {"stage4": "gaussian"},
        {"stage4": "softmax", "value_conv": (3, 0, 3, 3)},
        {"sampler": "avg", "ratios": (2, 2, 2, 1)},
    ],
    ids=str,
)
def test_only_what_shapes_tell_is_claimed(arguments: dict[str, object], tmp_path: Path) -> None:
    source, target = tmp_path / "in.pth", tmp_path / "out.safetensors"
    torch.save(timm.create_model("softpp_nano", **arguments).state_dict(), source)
    found = convert(source, target, "softpp").arguments
    for name, value in arguments.items():
        if name in ("tie_qk", "sampler"):
            assert name not in found
        elif "sampler" not in arguments:
            assert found[name] == value
    assert found["stage4"] == arguments.get("stage4", "soft")
    assert ("ratios" in found) == ("sampler" not in arguments)


def test_averaged_weights_come_first(released: Path) -> None:
    content = torch.load(released)
    content["state_dict_ema"] = {
        f"module.{key}": tensor + 1 for key, tensor in content["state_dict"].items()
    }
    torch.save(content, released)
    state = read_checkpoint(released)
    assert torch.equal(state["norm.weight"], content["state_dict"]["norm.weight"] + 1)


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("attacked"),)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "attack.pth"
    torch.save({"state_dict": {"norm.weight": torch.ones(3)}, "args": Attack()}, path)
    with pytest.raises(ValueError, match=r"attack.pth is refused: .* names .*, code that"):
        convert(path, tmp_path / "out.safetensors")
    with pytest.raises(RuntimeError, match="weights_only"):
        timm.create_model("softpp_nano", checkpoint_path=path)
    path.write_bytes(pickle.dumps({"state_dict": Attack()}))
    with pytest.raises(ValueError, match=r"attack.pth (is refused|cannot be read as weights)"):
        convert(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "attacked").exists()
    assert not (tmp_path / "out.safetensors").exists()


def test_broken_files_are_named(released: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    whole = released.read_bytes()
    released.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"released.pth cannot be read as weights .*truncated"):
        convert(released, target)
    save_file(build().state_dict(), tmp_path / "half.safetensors")
    whole = (tmp_path / "half.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"half.safetensors cannot be read .*truncated"):
        convert(tmp_path / "half.safetensors", target)
    with pytest.raises(ValueError, match=r"there is no file .*nowhere.pth"):
        convert(tmp_path / "nowhere.pth", target)
    torch.save({"state_dict": {"a": 1}}, released)
    with pytest.raises(ValueError, match=r"holds no state dict: a is no tensor"):
        convert(released, target)
    with pytest.raises(ValueError, match=r"must end in .safetensors, got out.pth"):
        convert(released, Path("out.pth"))
    assert not target.exists()


def test_foreign_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "resnet.pth"
    torch.save(timm.create_model("resnet10t").state_dict(), path)
    with pytest.raises(
        ValueError,
        match=r"holds no pyramid of this family: it has conv1.0.weight.* and not stages.0.embed.0",
    ):
        convert(path, tmp_path / "out.safetensors")
    with pytest.raises(
        ValueError,
        match=r"do not fit this SoftmaxFreeTransformer; missing: stages.0.*unknown: conv1.0.weight"
        r".*and \d+ more; they are those of another model",
    ):
        timm.create_model("softpp_nano", checkpoint_path=path)


def test_weights_that_do_not_fit_are_named(released: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"of other shape: head.weight \(7, 128\) in place of \(5, 128\).*num_classes=7",
    ):
        timm.create_model("soft_tiny_fudan", **MINI, num_classes=5, checkpoint_path=released)
    with pytest.raises(ValueError, match=r"missing: stages.2.blocks.2.*`softmaxfree convert`"):
        timm.create_model(
            "soft_tiny_fudan", **{**MINI, "depths": (1, 1, 3, 1)}, num_classes=7,
            checkpoint_path=released,
        )  # fmt: skip


def test_positions_are_resized_to_the_models_grid(released: Path) -> None:
    model = timm.create_model(
        "soft_tiny_fudan", **MINI, num_classes=7, img_size=(256, 192), checkpoint_path=released
    )
    assert model.stages[0].position.grid.shape == (1, 64, 48, 32)
    other = timm.create_model("soft_tiny_fudan", **MINI, num_classes=7, checkpoint_path=released)
    x = images(1, 3, 256, 192)
    torch.testing.assert_close(model.eval()(x), other.eval()(x), atol=1e-5, rtol=1e-5)


def test_released_names_are_known_inside_other_models(released: Path) -> None:
    """As a part of a training module, whose file has a prefix before every name."""
    whole = nn.ModuleDict({"backbone": build("soft_tiny_fudan", **MINI)})
    nn.init.zeros_(whole["backbone"].head.weight)
    state = {f"backbone.{k}": v for k, v in torch.load(released)["state_dict"].items()}
    whole.load_state_dict(state)
    assert whole["backbone"].head.weight.abs().sum() > 0


@pytest.mark.parametrize("safe", [True, False])
def test_timms_own_saving_round_trips(safe: bool, tmp_path: Path) -> None:
    arguments = {
        "num_landmarks": 4,
        "value_conv": 3,
        "attention": "soft",
        "embed_dims": [16, 32, 48, 64],
    }
    model = build("softpp_nano", **arguments, num_heads=[1, 2, 3, 4])
    folder = tmp_path / "saved"
    arguments["num_heads"] = [1, 2, 3, 4]
    save_for_hf(model, folder, model_args=arguments, safe_serialization=safe)
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    x = images(2, 3, 40, 40)
    assert torch.equal(loaded(x), model(x))


def test_tensors_of_others_under_our_names_are_a_sentence(tmp_path: Path) -> None:
    path, zeros = tmp_path / "file.pth", torch.zeros
    names = ("stages.0.embed.0.conv.weight", "stages.3.cls_token")
    some = dict.fromkeys((*names, "stages.0.position.grid"), zeros(1, 2, 2, 3))
    ours = {**some, **{f"stages.{i}.position.grid": zeros(1, 2, 2, 3) for i in range(4)}}
    theirs = {"pos_embed1": zeros(1, 9, 3), "patch_embed1.proj.0.weight": zeros(3, 3)}
    norm = "stages.0.blocks.0.attention.landmark_norm.0.weight"
    for state in (
        some, {**ours, norm: zeros(0)}, {**ours, "head.weight": zeros(())},
        {**theirs, "pos_embed1": zeros(3)}, {**theirs, "patch_embed1.proj.x": zeros(1)},
        {**theirs, "block1.0.attn.kv.weight": zeros(())}, {**theirs, "block1.0.": zeros(1)},
    ):  # fmt: skip
        torch.save(state, path)
        with pytest.raises(UserError, match=r"file.pth do not have the shapes .*Error: .* damaged"):
            convert(path, tmp_path / "file.safetensors")
    torch.save({"model.stages.0.position.grid": zeros(1, 0, 0, 3)}, path)
    with pytest.raises(UserError, match=r"file.pth do not have the shapes"):
        initialise(build(), find_weights(path))
