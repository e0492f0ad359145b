"""Order, shares, positions and randomness of what is loaded."""

import atexit
import multiprocessing.util
import os
import random
import signal
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from timm.data import IterableImageDataset, create_transform

from softmaxfree.data.counters import generators_kept, hash_counters, seed_sample
from softmaxfree.data.images import check_targets
from softmaxfree.data.loader import ResumableLoader, ShardedSampler, end_workers, prepare_worker
from softmaxfree.data.samples import NOTHING, Batch, ImageAlone, Samples, SampleStream, collate
from softmaxfree.data.sources import Digits, open_source
from softmaxfree.data.transforms import evaluation_transform, training_transform

from .folders import write_digits


def training_order(epoch: int, rank: int = 0, replicas: int = 1, length: int = 103) -> list[int]:
    sampler = ShardedSampler(length, 7, True, 20, rank, replicas)
    sampler.set_epoch(epoch)
    return [index for _, index in sampler]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    assert training_order(0) == training_order(0)
    assert training_order(0) != training_order(1)
    assert len(set(training_order(0))) == 100  # whole batches of 20 only


def test_a_process_that_fails_does_not_wait_for_its_workers() -> None:
    with warnings.catch_warnings(action="ignore"):  # of threads that a fork leaves behind
        child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits for ever
        atexit._clear()
        atexit.register(multiprocessing.util._exit_function)  # as Python does
        atexit.register(end_workers)
        loader = ResumableLoader([0] * 8, collate_fn=lambda _: Batch(*torch.zeros(3), ()),
                                 num_workers=2, worker_init_fn=prepare_worker)  # fmt: skip
        batches = iter(loader)
        next(batches)
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("replicas", [2, 4])
def test_processes_share_each_batch(replicas: int) -> None:
    whole = training_order(3)
    shares = [training_order(3, rank, replicas) for rank in range(replicas)]
    each = 20 // replicas
    for batch in range(5):
        together = [i for share in shares for i in share[batch * each : (batch + 1) * each]]
        assert sorted(together) == sorted(whole[batch * 20 : (batch + 1) * 20])


@pytest.mark.parametrize("length", [1, 9, 10, 11])
def test_evaluation_sees_every_image_once_whatever_the_number_of_processes(length: int) -> None:
    shares = [list(ShardedSampler(length, 0, False, 0, rank, 4)) for rank in range(4)]
    assert len({len(share) for share in shares}) == 1
    seen = [index for share in shares for _, index in share if index != NOTHING]
    assert sorted(seen) == list(range(length))


def folders(tmp_path: Path, augment: str | None = "rand-m9-mstd0.5-inc1") -> Samples:
    source = open_source("", str(write_digits(tmp_path)), "train")
    transform = training_transform(16, scale=(0.3, 1), auto_augment=augment, re_prob=0.5)
    nothing = torch.zeros(3, 16, 16), NOTHING
    return Samples(source, ImageAlone(transform), nothing, 5, training=True)  # type: ignore[arg-type]


def loader(samples: Samples, workers: int, epoch: int = 0) -> ResumableLoader:
    return ResumableLoader(
        samples,
        epoch=lambda: epoch,
        batch_size=10,
        sampler=ShardedSampler(len(samples), 5, True, 10, 0, 1),
        drop_last=True,
        collate_fn=collate,
        check=partial(check_targets, num_classes=None),
        num_workers=workers,
    )


def same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.images, other.images) and torch.equal(one.indices, other.indices)


def test_a_sample_depends_on_seed_epoch_and_image_alone(tmp_path: Path) -> None:
    samples = folders(tmp_path)
    first = samples[2, 7]
    random.random(), np.random.rand(), torch.rand(3)
    assert torch.equal(samples[2, 7].image, first.image)
    assert not torch.equal(samples[3, 7].image, first.image)
    here, in_workers = list(loader(samples, 0)), list(loader(samples, 2))
    assert len(here) == 6
    assert all(same(one, other) for one, other in zip(here, in_workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_it_was(workers: int, tmp_path: Path) -> None:
    samples = folders(tmp_path)
    whole = list(loader(samples, 0, epoch=4))
    begun = loader(samples, workers, epoch=4)
    batches = iter(begun)
    next(batches), next(batches)
    resumed = loader(samples, workers, epoch=4)
    resumed.load_state_dict(begun.state_dict())
    rest = list(resumed)
    assert all(same(one, other) for one, other in zip(rest, whole[2:], strict=True))
    assert resumed.state_dict() == {"position": 6}
    resumed.load_state_dict(resumed.state_dict())  # at the end of an epoch: the next one is whole
    assert len(list(resumed)) == 6
    assert resumed.waited > 0


def test_loading_leaves_the_callers_generators_alone(tmp_path: Path) -> None:
    samples = folders(tmp_path)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    samples[0, 3]
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_counters_do_not_collide() -> None:
    seeds = {hash_counters(0, epoch, index) for epoch in range(50) for index in range(200)}
    assert len(seeds) == 50 * 200
    assert hash_counters(1, 2) != hash_counters(2, 1)
    with generators_kept():
        seed_sample(1, 2, 3)
        first = random.random(), np.random.rand(), torch.rand(1).item()
        seed_sample(1, 2, 3)
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == first


def test_the_strongest_augmentation_goes_through() -> None:
    """timm asks for 0 bits at the highest magnitude, which Pillow refuses."""
    transform = training_transform(16, auto_augment="rand-m10-n8-inc1")
    image = Image.new("RGB", (16, 16), (200, 100, 50))
    for seed in range(200):
        random.seed(seed), np.random.seed(seed)
        assert transform(image).shape == (3, 16, 16)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # open shards
def test_shards_shuffled_by_workers_go_on_where_they_were(tmp_path: Path) -> None:
    digits = Digits("train")
    for shard in range(4):
        with webdataset.TarWriter(str(tmp_path / f"digits-{shard:04}.tar")) as writer:
            for index in range(shard * 30, shard * 30 + 30):
                image, target = digits.load(index)
                writer.write({"__key__": f"{index:04}", "png": image, "cls": target})

    def streamed() -> ResumableLoader:
        shards = "digits-{0000..0003}.tar|120"
        stream = open_source("wds/", str(tmp_path), shards, is_training=True, batch_size=10, seed=0)
        assert isinstance(stream, IterableImageDataset)
        stream.set_loader_cfg(num_workers=2)
        transform = training_transform(16, scale=(0.3, 1), re_prob=0.5)
        return ResumableLoader(
            SampleStream(stream, transform, 5), epoch=lambda: 3, batch_size=10, drop_last=True,
            collate_fn=collate, num_workers=2,
        )  # fmt: skip

    whole = [batch.images for batch in streamed()]
    assert len(whole) == 12
    resumed = streamed()
    resumed.load_state_dict({"position": 5})
    rest = [batch.images for batch in resumed]
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[5:], strict=True))


def break_images(root: Path) -> list[Path]:
    """Three files that cannot be read: cut off, empty, of another kind."""
    victims = sorted(root.rglob("*.png"))[:3]
    whole = victims[0].read_bytes()
    victims[0].write_bytes(whole[: len(whole) // 2])
    victims[1].write_bytes(b"")
    victims[2].write_text("no image")
    return victims


def test_broken_images_are_replaced_in_training_counted_and_named(tmp_path: Path) -> None:
    samples = folders(tmp_path, augment=None)
    victims = break_images(tmp_path / "train")
    with_broken = loader(samples, 0)
    batches = list(with_broken)
    assert len(batches) == 6
    assert {Path(path) for path in with_broken.broken} == set(victims)
    assert all((batch.targets >= 0).all() for batch in batches)
    list(with_broken)
    assert len(with_broken.broken) == 3  # each counts once


def test_broken_images_are_left_out_in_evaluation(tmp_path: Path) -> None:
    samples = folders(tmp_path, augment=None)
    break_images(tmp_path / "train")
    samples.training = False
    targets = torch.tensor([samples[0, index].target for index in range(len(samples))])
    assert (targets == NOTHING).sum() == 3


def test_a_data_set_of_broken_images_stops(tmp_path: Path) -> None:
    samples = folders(tmp_path, augment=None)
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"20 in a row .*png is the first"):
        list(loader(samples, 0))


def test_a_class_beyond_the_models_stops(tmp_path: Path) -> None:
    batches = loader(folders(tmp_path), 0)
    batches.check = partial(check_targets, num_classes=4)
    with pytest.raises(ValueError, match=r"has class [4-9], but the model has num_classes=4"):
        list(batches)


def test_the_last_steps_in_one_are_timms_two() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, 50, 3), generator=generator, dtype=torch.uint8)
    image = Image.fromarray(pixels.numpy())
    arguments = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3), "crop_pct": 0.875}
    expected = create_transform(32, **arguments)(image)
    torch.testing.assert_close(evaluation_transform(32, **arguments)(image), expected)


def test_the_padded_crop_keeps_the_scale() -> None:
    image = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    transform = training_transform(
        32, train_crop_mode="pad", hflip=0.0, color_jitter=None, mean=(0.0,) * 3, std=(1.0,) * 3
    )
    whole = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    padded = torch.nn.functional.pad(whole, (4, 4, 4, 4), mode="reflect")
    places = set()
    for seed in range(30):
        torch.manual_seed(seed)
        crop = transform(image)
        found = [(y, x) for y in range(9) for x in range(9)
                 if torch.allclose(crop, padded[:, y : y + 32, x : x + 32], atol=1e-6)]  # fmt: skip
        assert found, "not a part of the padded image"
        places |= set(found)
    assert len(places) > 10
