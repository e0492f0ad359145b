"""Data sets by name: what is in them, and what is said when something is wrong with them."""

from pathlib import Path

import pytest
import webdataset
from timm.data import IterableImageDataset

from softmaxfree.data.sources import Digits, Source, open_source

from .folders import write_digits


def opened(*words: str) -> Source:
    name, root, split = words
    source = open_source(name, root, split)
    assert isinstance(source, Source)
    return source


def test_a_fifth_of_the_digits_is_held_out() -> None:
    train, held_out = Digits("train"), Digits("validation")
    assert len(train) + len(held_out) == 1797
    assert len(held_out) == 360
    assert not set(train.numbers) & set(held_out.numbers)
    image, target = train.load(0)
    assert image.size == (8, 8)
    assert image.mode == "RGB"
    assert 0 <= target < 10
    assert train.classes == [str(digit) for digit in range(10)]


def test_image_folders_are_found_as_given_and_below_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_digits(tmp_path / "numbers", train=30, val=20)
    source = opened("", str(tmp_path / "numbers"), "train")
    assert len(source) == 30
    _, target = source.load(0)
    assert f"/train/{target}/" in source.describe(0)
    assert source.classes == [str(digit) for digit in range(10)]
    monkeypatch.setenv("SOFTMAXFREE_DATA", str(tmp_path))
    assert len(opened("", "numbers", "validation")) == 20  # val, by another of its usual names


def test_torchvisions_data_sets_are_read(tmp_path: Path) -> None:
    write_digits(tmp_path, train=30, val=20)
    source = opened("torch/image_folder", str(tmp_path / "train"), "train")
    image, _ = source.load(3)
    assert len(source) == 30
    assert image.mode == "RGB"
    assert source.describe(3).endswith(".png")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its open files
def test_webdataset_shards_are_read_in_order(tmp_path: Path) -> None:
    digits = Digits("train")
    with webdataset.TarWriter(str(tmp_path / "digits-0000.tar")) as shard:
        for index in range(12):
            image, target = digits.load(index)
            shard.write({"__key__": f"{index:04}", "png": image, "cls": target})
    shards = "digits-{0000..0000}.tar|12"
    stream = open_source("wds/", str(tmp_path), shards, batch_size=4, is_training=False, seed=0)
    assert isinstance(stream, IterableImageDataset)
    assert [target for _, target in stream] == [digits.load(index)[1] for index in range(12)]


@pytest.mark.parametrize(
    ("name", "root", "split", "sentence"),
    [
        ("", "nowhere", "train", "there is no folder nowhere"),
        ("", None, "train", "needs its folder"),
        ("", "numbers", "trian", "no split 'trian': its folders are train, val"),
        ("", "empty", "train", "cannot be opened: Found 0 images"),
        ("digits", None, "dev", "no split 'dev'"),
        ("torch/cifar10", "numbers", "train", "cannot be opened: Dataset not found"),
        ("torch/cifar10", "numbers", "dev", "no split 'dev'"),
        ("torch/no_such_set", "numbers", "train", "Unknown torchvision dataset"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    name: str,
    root: str | None,
    split: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_digits(tmp_path / "numbers", train=10, val=10)
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match=sentence) as caught:
        open_source(name, root, split)
    assert "\n" not in str(caught.value)
