"""Crops, sizes and batches of images with a class for every pixel."""

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from PIL import Image
from torch import Tensor

from softmaxfree.data import SegmentationData
from softmaxfree.data.label_maps import IGNORE
from softmaxfree.data.samples import Samples
from softmaxfree.data.segmentation import Augmentation, SegmentationBatch, Span

from .test_label_maps import CAMVID

PLAIN: dict[str, Any] = {"flip": 0.0, "photometric": False, "cat_max_ratio": 1.0}


def smooth(height: int, width: int) -> tuple[Image.Image, Tensor]:
    """A smooth image, and labels of columns 0 to 9 and rows in tens."""
    coarse = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    rows, columns = torch.arange(height) * 10 // height, torch.arange(width) * 10 // width
    return image, (rows[:, None] * 10 + columns).to(torch.uint8)


def augmented(
    image: Image.Image, labels: Tensor, seed: int = 0, **options: Any
) -> tuple[Tensor, Tensor]:
    usual = {"crop": (16, 24), "scale": (0.5, 2.0), **PLAIN}
    torch.manual_seed(seed)
    return Augmentation(**(usual | options))(image, labels)


@pytest.mark.parametrize("factor", [0.5, 0.83, 1.0, 1.37, 2.0])
def test_cutting_before_resizing_equals_resizing_before_cutting(factor: float) -> None:
    image, labels = smooth(67, 91)
    height, width = round(67 * factor), round(91 * factor)
    whole = image.resize((width, height), Image.Resampling.BILINEAR)
    size = (height, width)
    whole_labels = F.interpolate(labels[None, None].double(), size, mode="nearest-exact")[0, 0]
    for seed in range(20):
        pixels, cut = augmented(image, labels, seed, scale=(factor, factor))
        torch.manual_seed(seed)
        torch.rand(())
        top, left = Span.draw(16, 67, factor).start, Span.draw(24, 91, factor).start
        expected = torch.from_numpy(np.array(whole)).permute(2, 0, 1)
        expected = expected[:, top : top + 16, left : left + 24]
        assert torch.equal(cut, whole_labels[top : top + 16, left : left + 24].to(torch.uint8))
        inside = (slice(None), slice(2, -2), slice(2, -2))  # at the edges less is known outside
        apart = (pixels.int() - expected.int()).abs()
        assert apart[inside].max() <= 1
        assert apart.max() <= 12


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 1.9])
def test_labels_stay_on_their_pixels(factor: float) -> None:
    """An image whose colour is its label: both are resized, cut and flipped alike."""
    labels = torch.arange(8).repeat_interleave(40).repeat(80, 1).to(torch.uint8)
    image = Image.fromarray((labels * 30).numpy()).convert("RGB")
    for seed in range(8):
        pixels, cut = augmented(image, labels, seed, scale=(factor, factor), flip=0.5)
        there = cut != IGNORE
        close = (pixels[0][there].int() - cut[there].int() * 30).abs() <= 15
        assert close.float().mean() > 0.9


def test_small_images_are_padded() -> None:
    image, labels = smooth(10, 40)
    pixels, cut = augmented(image, labels, crop=(16, 24), scale=(1.0, 1.0))
    assert pixels.shape == (3, 16, 24)
    assert cut.shape == (16, 24)
    assert pixels.dtype == cut.dtype == torch.uint8
    assert (cut[:10] != IGNORE).all()
    assert (cut[10:] == IGNORE).all()
    assert (pixels[:, 10:] == torch.tensor([124, 116, 104])[:, None, None]).all()
    tiny, _ = augmented(image, labels, scale=(0.001, 0.001))
    assert (tiny.flatten(1)[:, 1:] == torch.tensor([124, 116, 104])[:, None]).all()


def test_scales_are_relative_to_a_size_where_one_is_given() -> None:
    image, labels = smooth(67, 91)
    asked = {"scale": (1.0, 1.0), "train_size": 134}
    for one, other in zip(
        augmented(image, labels, **asked), augmented(image, labels, scale=(2.0, 2.0))
    ):
        assert torch.equal(one, other)


def test_scales_are_drawn_from_their_range() -> None:
    """Columns have the values 0 to 199: how fast they change tells the scale."""
    labels = torch.arange(200, dtype=torch.uint8).repeat(200, 1)
    image = Image.fromarray(labels.numpy()).convert("RGB")
    factors = []
    for seed in range(60):
        _, cut = augmented(image, labels, seed, crop=(50, 50))
        factors.append(49 / (int(cut[0, -1]) - int(cut[0, 0])))
    assert 0.48 < min(factors) < 0.6
    assert 1.8 < max(factors) < 2.2


def test_half_of_the_crops_are_flipped() -> None:
    image, labels = smooth(40, 60)
    crops = [augmented(image, labels, seed, flip=0.5, crop=(40, 60)) for seed in range(100)]
    flipped = [bool(cut[0, 0] > cut[0, 9]) for _, cut in crops if cut[0, 9] != IGNORE]
    assert 30 < sum(flipped) < 70
    (pixels, cut), (mirrored, mirrored_cut) = (
        augmented(image, labels, crop=(40, 60), scale=(1.0, 1.0), flip=flip) for flip in (0.0, 1.0)
    )
    assert torch.equal(pixels.flip(-1), mirrored)
    assert torch.equal(cut.flip(-1), mirrored_cut)


def test_colours_are_distorted_but_not_exchanged() -> None:
    image, labels = Image.new("RGB", (40, 40), (40, 90, 200)), torch.zeros(40, 40).to(torch.uint8)
    seen = [augmented(image, labels, n, photometric=True, scale=(1, 1))[0] for n in range(40)]
    assert len({tuple(pixels[:, 0, 0].tolist()) for pixels in seen}) > 20
    assert all(pixels[0, 0, 0] < pixels[1, 0, 0] < pixels[2, 0, 0] for pixels in seen)


def test_crops_with_too_much_of_a_class_are_drawn_again() -> None:
    labels = torch.zeros(64, 64, dtype=torch.uint8)
    labels[:, 40:] = torch.tensor([1, 2]).repeat(12)
    labels[:, :8] = IGNORE
    image = Image.new("RGB", (64, 64))

    def single(ratio: float) -> int:
        options = {"crop": (8, 8), "scale": (1.0, 1.0), "cat_max_ratio": ratio}
        crops = [augmented(image, labels, seed, **options)[1] for seed in range(100)]
        return sum(len(set(crop.unique().tolist()) - {IGNORE}) < 2 for crop in crops)

    assert single(1.0) > 40
    assert single(0.75) < 5


def test_a_class_that_is_everywhere_does_not_stop_the_drawing() -> None:
    image = Image.new("RGB", (64, 64))
    for value in (0, IGNORE):
        labels = torch.full((64, 64), value, dtype=torch.uint8)
        _, cut = augmented(image, labels, cat_max_ratio=0.5, scale=(1.0, 1.0))
        assert (cut == value).all()


def made(stage: str = "fit", num_classes: int | None = None, **options: Any) -> SegmentationData:
    """Data whose trainer is there, as when it is fitted."""
    usual = {"batch_size": 4, "num_workers": 0, "crop": 64, "eval_batch_size": 3}
    data = SegmentationData(**(usual | options))
    data.trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    if num_classes is not None:
        data.num_classes = lambda: num_classes  # type: ignore[method-assign]
    data.setup(stage)
    return data


def first(data: SegmentationData, part: str = "train") -> SegmentationBatch:
    batch: SegmentationBatch = next(iter(getattr(data, f"{part}_dataloader")()))
    return batch


def write_folders(root: Path, count: int = 4, size: tuple[int, int] = (48, 36)) -> dict[str, Any]:
    """{train,val}/N.png and {train,val}annot/N.png; what tells SegmentationData of them."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for folder, top in ((split, 256), (f"{split}annot", 2)):
            (root / folder).mkdir()
            for number in range(count):
                values = rng.integers(0, top, size[::-1], dtype=np.uint8)
                Image.fromarray(values).save(root / folder / f"{number}.png")
    folders = {"image_folder": "{split}", "label_folder": "{split}annot"}
    return {"name": "folders", "root": str(root), "classes": ["sky", "road"], **folders}


def test_training_batches_are_crops_of_one_size() -> None:
    data = made(crop=(32, 48))
    assert data.classes is not None
    assert len(data.classes) == len(data.palette) == 11
    batch = first(data)
    assert torch.stack(batch.images).shape == (4, 3, 32, 48)
    assert all(labels is not None and labels.shape == (32, 48) for labels in batch.labels)
    assert {t.dtype for t in [*batch.images, *batch.labels] if t is not None} == {torch.uint8}
    assert batch.indices.shape == (4,)
    assert batch.broken == ()


def test_images_to_be_scored_are_resized_and_their_labels_are_not(tmp_path: Path) -> None:
    folders = write_folders(tmp_path)
    for options, size in (
        ({}, (36, 48)),
        ({"eval_size": 72}, (72, 96)),
        ({"eval_size": 72, "eval_max_size": 80}, (60, 80)),
        ({"eval_size": 18}, (18, 24)),
    ):
        batch = first(made("validate", **folders, **options), "val")
        assert [image.shape for image in batch.images] == [(3, *size)] * 3
        assert all(image.is_contiguous() for image in batch.images)
        assert all(labels is not None and labels.shape == (36, 48) for labels in batch.labels)
        assert batch.indices.tolist() == [0, 1, 2]
    image = Image.open(tmp_path / "val" / "0.png").convert("RGB")
    expected = np.array(image.resize((24, 18), Image.Resampling.BILINEAR))  # antialiased
    assert np.array_equal(batch.images[0].permute(1, 2, 0).numpy(), expected)


def test_the_test_split_is_that_of_validation_if_not_given(tmp_path: Path) -> None:
    folders = write_folders(tmp_path)
    for split, folder in ((None, "val"), ("train", "train")):
        data = made("test", **folders, test_split=split)
        assert data.sources["test"].describe(0) == str(tmp_path / folder / "0.png")
        assert len(first(data, "test").images) == 3


def test_crops_are_a_function_of_seed_epoch_and_image() -> None:
    loaders = (made(seed=seed).train_dataloader() for seed in (5, 5, 6))
    dataset, again, other = (cast(Samples, loader.dataset) for loader in loaders)
    states = random.getstate(), np.random.get_state()[1], torch.get_rng_state()
    sample = dataset[0, 7]
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    torch.manual_seed(123)
    again[0, 3]
    for one, equal in ((again[0, 7], True), (other[0, 7], False), (again[1, 7], False)):
        assert torch.equal(sample.image, one.image) is equal
        assert torch.equal(sample.target, one.target) is equal


def test_crops_follow_from_torchs_generator_alone() -> None:
    image, labels = smooth(60, 60)
    options: dict[str, Any] = {"flip": 0.5, "photometric": True, "cat_max_ratio": 0.05}
    crops = []
    for seed in range(2):
        random.seed(seed)
        np.random.seed(seed)
        crops.append(augmented(image, labels, **options))
    assert all(torch.equal(a, b) for a, b in zip(*crops))


def test_workers_give_the_same_batches() -> None:
    alone, shared = (first(made(num_workers=workers)) for workers in (0, 2))
    for one, other in ((alone.images, shared.images), (alone.labels, shared.labels)):
        assert all(torch.equal(a, b) for a, b in zip(one, other))  # type: ignore[arg-type]


def test_what_cannot_be_read_is_named_and_replaced_or_left_out(tmp_path: Path) -> None:
    folders = write_folders(tmp_path)
    data = made(**folders, crop=16)
    Image.new("L", (48, 36), 7).save(tmp_path / "trainannot" / "1.png")
    (tmp_path / "val" / "2.png").write_bytes(b"")
    batch = first(data)
    assert [path for path, _ in batch.broken] == [str(tmp_path / "train" / "1.png")]
    assert "1.png has the value 7, but with 2 classes" in batch.broken[0][1]
    assert sorted(batch.indices.tolist()) == [0, 2, 2, 3]
    scored = first(data, "val")
    assert [labels is None for labels in scored.labels] == [False, False, True]
    assert scored.images[2].shape == (3, 1, 1)
    for number in range(4):
        Image.new("L", (48, 36), 7).save(tmp_path / "trainannot" / f"{number}.png")
    with pytest.raises(ValueError, match="4 samples cannot be read, among them 20 in a row"):
        first(data)


def test_padding_of_shares_has_no_labels(tmp_path: Path) -> None:
    data = made("validate", **write_folders(tmp_path))
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_rank=1, world_size=3, current_epoch=0, accumulate_grad_batches=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    batch = first(data, "val")
    assert batch.indices.tolist() == [1, -1]
    assert [labels is None for labels in batch.labels] == [False, True]


def test_classes_are_those_of_the_model() -> None:
    made(num_classes=11)
    with pytest.raises(ValueError, match=r"the data has 11 classes .* give --model.num_classes 11"):
        made(num_classes=10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"crop": 0}, "--data.crop must be from 1 to 4096 pixels, got 0"),
        ({"crop": (64, 10**9)}, "--data.crop must be from 1 to 4096 pixels, got 1000000000"),
        ({"train_size": 0}, "--data.train_size must be from 1 to 4096 pixels, got 0"),
        ({"eval_size": 10**9}, "--data.eval_size must be from 1 to 4096 pixels, got 1000000000"),
        (
            {"eval_size": 64, "eval_max_size": 4097},
            "--data.eval_max_size must be from 1 to 4096 pixels, got 4097",
        ),
        ({"scale": (2.0, 0.5)}, "images cannot be scaled by 2.0 to 0.5: give two factors above 0"),
        ({"scale": (0.0, 1.0)}, "images cannot be scaled by 0.0 to 1.0"),
        ({"flip": 2.0}, "--data.flip is 2.0: give a number from 0 to 1"),
        ({"cat_max_ratio": 75.0}, "--data.cat_max_ratio is 75.0: give a number from 0 to 1"),
        ({"eval_max_size": 64}, "--data.eval_max_size 64 limits .* --data.eval_size, which is No"),
        ({"eval_size": 64, "eval_max_size": 64}, "which is 64: give a smaller eval_size"),
        ({"classes": ["a"]}, "digit_scenes takes no classes: only the data set folders does"),
        ({"name": "pascal"}, "no data set of label maps 'pascal'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        made(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("root", "options", "count"),
    [
        ("camvid", {"name": "folders", **CAMVID}, 74),
        ("ade20k_3", {"name": "ade20k", "train_split": "", "val_split": ""}, 3),
    ],
)
def test_real_scenes_are_loaded(root: str, options: dict[str, Any], count: int) -> None:
    if not (Path(os.environ.get("SOFTMAXFREE_DATA", "")) / root).is_dir():
        pytest.skip(f"{root} is not in the folder that SOFTMAXFREE_DATA names")
    data = made(root=root, batch_size=3, crop=256, eval_size=128, **options)
    assert len(data.sources["train"]) == count
    assert torch.stack(first(data).images).shape == (3, 3, 256, 256)
    batch = first(data, "val")
    assert all(min(image.shape[1:]) == 128 for image in batch.images)
    assert not batch.broken
