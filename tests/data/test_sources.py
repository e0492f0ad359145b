"""Data sets by name: what is in them, and what is said when something is wrong with them."""

import shutil
from pathlib import Path

import pytest
import webdataset
from timm.data import IterableImageDataset

from softmaxfree.data.image_files import SUFFIXES
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


def test_a_fifth_of_each_class_is_held_out_where_there_are_no_splits(tmp_path: Path) -> None:
    """By the names of files alone: the same wherever the folder lies, and whatever is beside."""
    write_digits(tmp_path / "whole", train=100, val=10)
    shutil.move(tmp_path / "whole/val", tmp_path / "val")
    (tmp_path / "flat/.cache").mkdir(parents=True)
    for folder in (tmp_path / "whole/train").iterdir():
        shutil.copytree(folder, tmp_path / "flat" / folder.name)
    parts = []
    for root in ("whole", "flat"):  # root/train alone, and classes alone
        train, val = (opened("", str(tmp_path / root), split) for split in ("train", "validation"))
        files = [{Path(part.describe(i)).name for i in range(len(part))} for part in (train, val)]
        assert not files[0] & files[1]
        assert len(files[0] | files[1]) == 100
        assert {val.load(i)[1] for i in range(len(val))} == set(range(10))
        assert "a fifth of each class" in val.origin
        parts.append(files[1])
    assert parts[0] == parts[1]
    assert 10 <= len(parts[0]) <= 20


def test_splits_are_found_by_their_usual_names(tmp_path: Path) -> None:
    write_digits(tmp_path, train=20, val=12)
    for name in ("validation", "valid", "test"):
        shutil.move(next(path for path in tmp_path.iterdir() if path.name != "train"),
                    tmp_path / name)  # fmt: skip
        assert len(opened("", str(tmp_path), "validation")) == 12
    assert len(opened("", str(tmp_path), "train")) == 20


def test_a_class_may_be_called_like_a_split(tmp_path: Path) -> None:
    write_digits(tmp_path / "split", train=100, val=10)
    for name, digit in (("train", "1"), ("bus", "2")):
        shutil.copytree(tmp_path / "split/train" / digit, tmp_path / "vehicles" / name)
    assert opened("", str(tmp_path / "vehicles"), "train").classes == ["bus", "train"]


def test_all_formats_are_found_and_hidden_or_empty_folders_left_out(tmp_path: Path) -> None:
    image, _ = Digits("train").load(0)
    for suffix in SUFFIXES:
        (tmp_path / f"a{suffix}").mkdir()
        image.convert("L" if suffix == ".pgm" else "RGB").save(tmp_path / f"a{suffix}/0{suffix}")
    for name in (".ipynb_checkpoints", "a.png/.thumbnails", "nothing"):
        (tmp_path / name).mkdir()
    for hidden in (".ipynb_checkpoints/0.png", "a.png/.thumbnails/0.png", "a.png/._0.png"):
        image.save(tmp_path / hidden)
    source = opened("", str(tmp_path), "")
    assert source.classes == sorted(f"a{suffix}" for suffix in SUFFIXES)
    assert [source.load(i)[0].size for i in range(len(source))] == [(8, 8)] * len(SUFFIXES)
    assert source.left_out == (f"{tmp_path}/nothing/",)


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
        ("", "empty", "train", "empty has no images in folders of .* takes empty/CLASS/IMAGE, or"),
        ("", "loose", "train", "loose/0.png lies in no folder of a class: .*, loose/CLASS/IMAGE"),
        ("", "no_classes", "train", "splits without classes: .*, no_classes/train/CLASS/IMAGE"),
        ("", "lonely", "val", "lonely/dog/0.png is the only image of its class: .* at least two"),
        ("", "no_train", "train", "train split, train or training: .* are val; .*.train_split"),
        ("", "no_val", "validation", "val split, val or valid .* or test: .* are dev, training; r"),
        ("", "a file.png", "train", "a file.png is a file: give the folder"),
        ("", "imagenet", "train", "imagenet, which holds ImageNet-1K, https://image-net.org, as"),
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
    image, _ = Digits("train").load(0)
    for file in ("loose/0", "no_classes/train/0", "no_classes/val/0", "lonely/cat/0",
                 "lonely/dog/0", "lonely/cat/1", "no_train/val/cat/0", "no_val/training/cat/0",
                 "no_val/dev/cat/0", "a file"):  # fmt: skip
        path = tmp_path / f"{file}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    with pytest.raises(ValueError, match=sentence) as caught:
        open_source(name, root, split)
    assert "\n" not in str(caught.value)
