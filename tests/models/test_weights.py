"""Which weights: every way to name them gives the same model, prepared in the same way."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import save_for_hf

from softmaxfree.data.sources import Digits
from softmaxfree.errors import UserError
from softmaxfree.layers.registry import attention_class
from softmaxfree.models.build import build_model
from softmaxfree.models.convert import convert
from softmaxfree.models.variants import PUBLISHED
from softmaxfree.models.weights import PACKAGED, Preparation, find_weights
from softmaxfree.tasks.predict import Classifier

CIFAR10 = "softpp_nano.cifar10"


@pytest.mark.parametrize("name", [name for name in PACKAGED if name.startswith("digits")])
def test_a_packaged_model_knows_its_digits(name: str) -> None:
    classifier = Classifier(find_weights(name))
    assert classifier.size == 32
    assert classifier.classes == [str(digit) for digit in range(10)]
    first = classifier.model.get_submodule("stages.0.blocks.0.attention")
    assert isinstance(first, attention_class(name.removeprefix("digits-")))
    loaded = [Digits("val").load(index) for index in range(0, 360, 9)]
    with torch.no_grad():
        logits = classifier.model(torch.cat([classifier.tensor(image) for image, _ in loaded]))
    correct = logits.argmax(1) == torch.tensor([target for _, target in loaded])
    assert correct.float().mean() >= 0.95


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_name_gives_model_preparation_and_classes(name: str) -> None:
    weights = find_weights(name)
    images = torch.randn(2, 3, 32, 32)
    expected = timm.create_model(name, pretrained=True).eval()
    assert torch.equal(weights.build()(images), expected(images))
    assert weights.preparation == Preparation(
        32, (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616), 1.0, "bicubic"
    )
    assert weights.classes[3] == "cat"
    assert (weights.source, weights.task) == (name, "Classification")


@pytest.mark.parametrize("way", ["local-dir", "folder", "checkpoint", "run", "converted"])
def test_every_way_gives_the_same_classifier(way: str, tmp_path: Path) -> None:
    known = find_weights(CIFAR10)
    if way in ("local-dir", "folder"):
        model = timm.create_model(CIFAR10, pretrained=True)
        save_for_hf(model, tmp_path, safe_serialization=way == "folder")
        source = f"local-dir:{tmp_path}" if way == "local-dir" else str(tmp_path)
    else:
        state = {f"model.{name}": tensor for name, tensor in known.state.items()}
        torch.save({**known.told, "state_dict": state}, tmp_path / "last.ckpt")
        source = str(tmp_path if way == "run" else tmp_path / "last.ckpt")
    if way == "converted":
        assert convert(source, tmp_path / "model.safetensors") is None
        source = str(tmp_path / "model.safetensors")
    found = find_weights(source)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(found.build()(images), known.build()(images))
    assert (found.preparation, found.classes) == (known.preparation, known.classes)


def test_what_a_folder_tells_is_checked(tmp_path: Path) -> None:
    """timm would pass all of model_args on, also where weights are loaded from."""
    model = timm.create_model("softpp_nano", num_classes=10)
    save_for_hf(model, tmp_path, model_args={"norm_layer": {"class_path": "evil.Norm"}})
    with pytest.raises(UserError, match=r"options.norm_layer of the model, which is not taken"):
        find_weights(f"local-dir:{tmp_path}").build()
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "hf-hub:evil/model"}))
    with pytest.raises(UserError, match="no num_classes: it is damaged"):
        find_weights(tmp_path).build()
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"config.json tells about its weights cannot be read"):
        find_weights(tmp_path)


def test_tensors_alone_say_what_to_do(tmp_path: Path) -> None:
    weights = find_weights(CIFAR10)
    save_file(weights.state, tmp_path / "alone.safetensors")
    found = find_weights(tmp_path / "alone.safetensors")
    assert found.task is None
    assert found.state.keys() == weights.state.keys()
    with pytest.raises(UserError, match=r"does not say which model .* `softmaxfree convert` makes"):
        found.build()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("softpp_nano", "softpp_nano is a model without trained weights: choose .*nano.cifar10"),
        ("softpp_nano.foo", "softpp_nano.foo is a model without trained weights: choose"),
        ("softpp_tiny", "train it with `softmaxfree fit`"),
        ("softpp_nano.cifar", "is a model without trained weights: choose softpp_nano.cifar10"),
        ("digits-linformer", "no weights digits-linformer: did you mean .*digits-"),
        ("no/such.pth", "there is no file no/such.pth: give a name such as"),
        ("no/such.ckpt", "there is no checkpoint no/such.ckpt"),
        ("local-dir:no", "local-dir:no holds no weights: give the folder of a run"),
        (".", r"\. holds no weights: give the folder of a run, with last.ckpt, or one with config"),
    ],
)
def test_what_is_not_there_is_refused_in_a_sentence(
    source: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        find_weights(source)


def test_a_tag_that_is_not_there_is_refused_before_training() -> None:
    with pytest.raises(UserError, match=r"softpp_nano has no weights 'foo'; choose .*\.cifar10"):
        build_model("softpp_nano.foo", 10)


def test_a_file_cannot_name_other_weights(tmp_path: Path) -> None:
    known = find_weights(CIFAR10)
    told = {**known.told["hyper_parameters"], "backbone": "softpp_nano.evil"}
    path = tmp_path / "x.ckpt"
    torch.save({**known.told, "hyper_parameters": told, "state_dict": known.state}, path)
    assert find_weights(path).config()[0].name == "softpp_nano"
    shutil.copy(PACKAGED["digits-softpp"], tmp_path / "copy.safetensors")
    assert find_weights(tmp_path / "copy.safetensors").classes[7] == "7"
