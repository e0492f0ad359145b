"""Segmentation: scores against a plain count, windows, what trains, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from softmaxfree.data.label_maps import IGNORE, open_label_maps
from softmaxfree.data.segmentation import SegmentationBatch
from softmaxfree.errors import UserError
from softmaxfree.lab.measure import in_fresh_process, peak_memory
from softmaxfree.models.build import BackboneConfig, build_model
from softmaxfree.tasks import Segmentation
from softmaxfree.tasks.predict import run as predict
from softmaxfree.tasks.segmentation import pixel_loss, scores_of
from softmaxfree.tasks.windows import places, sliding_logits
from softmaxfree.training.command import run
from softmaxfree.training.log import read_metrics
from softmaxfree.training.runs import compare_runs

from ..training.conftest import held_out

TINY: dict[str, Any] = {
    "num_classes": 11,
    "options": {"embed_dims": [16, 16, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]},
    "width": 16,
}


def plain_scores(found: np.ndarray, truth: np.ndarray, classes: int) -> tuple[float, float]:
    """mIoU and pixel accuracy, class by class and pixel by pixel."""
    counted = truth != IGNORE
    found, truth = found[counted], truth[counted]
    ious = []
    for number in range(classes):
        union = ((found == number) | (truth == number)).sum()
        if union:
            ious.append(((found == number) & (truth == number)).sum() / union)
    return float(np.mean(ious)), float((found == truth).mean())


def test_scores_are_those_of_a_plain_count() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 5, (4, 30, 40))  # of 8 classes; 5 and 6 are found, 7 nowhere
    found = np.where(rng.random(truth.shape) < 0.6, truth, rng.integers(0, 7, truth.shape))
    truth[rng.random(truth.shape) < 0.1] = IGNORE
    metric = MulticlassConfusionMatrix(8, ignore_index=IGNORE)
    for one, other in zip(found, truth):
        metric.update(torch.from_numpy(one), torch.from_numpy(other))
    scores = scores_of(metric.compute(), list("abcdefgh"))
    miou, accuracy = plain_scores(found, truth, 8)
    assert scores["mIoU"] == pytest.approx(miou, abs=1e-6)
    assert scores["pixel_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert "IoU/h" not in scores  # a class of which nothing is known is not a zero
    assert scores["IoU/f"] == 0


def test_pixels_that_do_not_count_have_no_part_in_the_loss() -> None:
    logits = torch.randn(2, 3, 4, 5, requires_grad=True)
    labels = torch.randint(0, 3, (2, 4, 5))
    labels[:, :2] = IGNORE
    expected = torch.nn.functional.cross_entropy(logits[:, :, 2:], labels[:, 2:])
    torch.testing.assert_close(pixel_loss(logits, labels), expected)
    nothing = pixel_loss(logits, torch.full_like(labels, IGNORE))
    assert nothing == 0  # not nan, which would end the run


@pytest.mark.parametrize(
    ("side", "window", "step", "expected"),
    [(10, 4, 3, [0, 3, 6]), (11, 4, 3, [0, 3, 6, 7]), (4, 4, 2, [0]), (3, 4, 2, [0]),
     (5, 4, 4, [0, 1])],
)  # fmt: skip
def test_windows_cover_a_side_and_end_with_it(
    side: int, window: int, step: int, expected: list[int]
) -> None:
    assert places(side, window, step) == expected


def test_windows_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="without gaps: window 4, step 5"):
        places(10, 4, 5)
    with pytest.raises(ValueError, match=r"give --model\.window too"):
        Segmentation(**TINY, step=5)


@pytest.mark.parametrize("side", [-1, 0, 4097, 10**9])
def test_windows_that_images_cannot_have_are_refused(side: int) -> None:
    with pytest.raises(UserError, match=rf"--model\.window must be .* 4096 pixels, got {side}"):
        Segmentation(**TINY, window=side)
    with pytest.raises(UserError, match=rf"--model\.step must be .* 4096 pixels, got {side}"):
        Segmentation(**TINY, window=64, step=side)


def test_windows_of_what_looks_at_pixels_alone_change_nothing() -> None:
    def segment(images: Tensor) -> Tensor:
        return torch.cat([images.sin(), images.cos()], 1)

    images = torch.randn(2, 3, 33, 50)
    torch.testing.assert_close(sliding_logits(segment, images, 16, 11), segment(images))


def test_one_window_that_covers_the_image_is_the_whole_image() -> None:
    torch.manual_seed(0)
    task = Segmentation(**TINY).eval()
    image = torch.randint(0, 256, (3, 48, 70), dtype=torch.uint8)
    with torch.no_grad():
        whole = task(image)
        task.window = 80
        assert torch.equal(task(image), whole)
        task.window = 32
        assert not torch.equal(task(image), whole)


def memory_of_windows() -> int:
    """Bytes that sliding windows over 1024 x 2048 pixels take, weights included."""
    torch.set_num_threads(1)

    def infer() -> None:
        options = {"num_landmarks": 49, "depths": [1, 1, 1, 1]}
        task = Segmentation(
            num_classes=19, backbone="softpp_small", options=options, width=128, window=768,
            step=768,
        ).eval()  # fmt: skip
        with torch.no_grad():
            task(torch.zeros(3, 1024, 2048, dtype=torch.uint8))

    return peak_memory(infer)


def configuration(folder: Path, **changes: Any) -> Path:
    path = folder / "segmentation.yaml"
    path.write_text(yaml.safe_dump({
        "trainer": {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 2,
                    "limit_val_batches": 3, "enable_progress_bar": False, "log_every_n_steps": 1},
        "model": {"class_path": "softmaxfree.tasks.Segmentation",
                  "init_args": {**TINY, "ema": 0.9, **changes}},
        "data": {"class_path": "softmaxfree.data.SegmentationData", "init_args": {
            "batch_size": 2, "num_workers": 0, "crop": 64}},
    }))  # fmt: skip
    return path


def opened(path: str) -> Image.Image:
    with Image.open(path) as image:
        image.load()
    return image


def test_a_run_is_trained_scored_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("fit", ["--config", str(configuration(tmp_path)), "--out", "run"])
    printed = capsys.readouterr().out
    told = json.loads(Path("run/run.json").read_text())["scores"]
    assert held_out(printed) == f"held-out mIoU: {told['mIoU'] * 100:.1f} %"
    assert Path("run/run.png").exists()

    run("validate", ["--checkpoint", "run/last.ckpt"])
    assert f"val/mIoU{'':16}{told['mIoU']:.4f}" in capsys.readouterr().out
    compare_runs([Path("run")], None)
    header, _, line = (text.split() for text in capsys.readouterr().out.splitlines())
    assert header[-2:] == ["mIoU", "pixel_accuracy"]
    assert line[-2:] == [f"{told[name]:.3f}" for name in ("mIoU", "pixel_accuracy")]

    predict([Path("run/example.png")], Path("run/last.ckpt"))
    shares = json.loads(Path("predictions/found.jsonl").read_text())["found"]
    assert sum(entry["share"] for entry in shares) == pytest.approx(1)
    image, labels, overlay = (
        opened(path) for path in ("run/example.png", "predictions/example-labels.png",
                                  "predictions/example.png")
    )  # fmt: skip
    assert labels.mode == "P"
    assert labels.size == image.size
    assert labels.getpalette()[3:6] == [*open_label_maps("digit_scenes", None, "val").palette[1]]
    values = np.asarray(labels)
    assert values.max() < 11
    assert len(np.unique(values)) == len(shares)
    assert overlay.width > image.width  # the legend is beside it
    with pytest.raises(ValueError, match="finds classes of pixels, and takes no --top"):
        predict([Path("run/example.png")], Path("run/last.ckpt"), top=3)


def test_a_run_may_be_as_long_as_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the recipes of ADE20K and Cityscapes: validation is by steps, over epochs."""
    monkeypatch.chdir(tmp_path)
    steps = ["--trainer.max_epochs=-1", "--trainer.max_steps=5", "--trainer.val_check_interval=2",
             "--trainer.check_val_every_n_epoch=null", "--trainer.limit_train_batches=3",
             "--model.schedule=poly", "--model.min_lr=0", "--trainer.limit_val_batches=1",
             "--trainer.num_sanity_val_steps=0"]  # fmt: skip
    run("fit", ["--config", str(configuration(tmp_path)), "--out", "run", *steps])
    end = torch.load("run/last.ckpt", weights_only=True)
    assert end["global_step"] == 5
    metrics = read_metrics(Path("run/metrics.jsonl"))
    assert [step for step, _ in metrics["val/mIoU"]] == [1, 3, 5]  # every second, and at the end
    assert end["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0, abs=1e-9)


def test_validation_scores_what_the_model_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed score against a plain count of its own predictions."""
    monkeypatch.chdir(tmp_path)
    run("fit", ["--config", str(configuration(tmp_path)), "--out", "run"])
    told = json.loads(Path("run/run.json").read_text())["scores"]
    task = Segmentation(**TINY).eval()
    task.load_state_dict(torch.load("run/last.ckpt", weights_only=True)["state_dict"])
    maps = open_label_maps("digit_scenes", None, "val")
    found, truth = [], []
    for index in range(3):
        image, labels = maps.load(index)
        with torch.no_grad():
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
            found.append(task(pixels).argmax(0).numpy())
        truth.append(labels.numpy())
    miou, accuracy = plain_scores(np.stack(found), np.stack(truth), 11)
    assert told["mIoU"] == pytest.approx(miou, abs=1e-6)
    assert told["pixel_accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_images_are_scored_at_the_size_of_their_labels_without_what_is_ignored() -> None:
    torch.manual_seed(0)
    task = Segmentation(**TINY).eval()
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in ((40, 56), (33, 64))]
    labels = [torch.randint(0, 11, size, dtype=torch.uint8) for size in ((40, 56), (66, 128))]
    for each in labels:
        each[: each.shape[0] // 2] = IGNORE
    nothing = torch.zeros(3, 1, 1, dtype=torch.uint8)  # of a process that has one image fewer
    batch = SegmentationBatch([*images, nothing], [*labels, None], torch.tensor([0, 1, -1]), ())
    found = []
    with torch.no_grad():
        task.validation_step(batch, 0)
        for image, truth in zip(images, labels):
            logits = torch.nn.functional.interpolate(
                task(image)[None], truth.shape, mode="bilinear"
            )
            found.append(logits[0].argmax(0).flatten().numpy())
    truths = np.concatenate([each.flatten().numpy() for each in labels])
    scores = scores_of(task.confusion.compute(), [*map(str, range(11))])
    miou, accuracy = plain_scores(np.concatenate(found), truths, 11)
    assert scores["mIoU"] == pytest.approx(miou, abs=1e-6)
    assert scores["pixel_accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_one_image_at_a_time_is_refused_where_it_is_pooled_to_a_pixel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = ["--data.batch_size=1", "--trainer.limit_val_batches=0"]
    with pytest.raises(ValueError, match=r"give --data\.batch_size 2 or more for each process"):
        run("fit", ["--config", str(configuration(tmp_path)), "--out", "run", *one])


def test_the_backbone_starts_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(
        build_model(BackboneConfig("softpp_nano", options=TINY["options"]), 5).state_dict(),
        "backbone.pth",
    )
    config = configuration(tmp_path, init_checkpoint="backbone.pth")
    run("fit", ["--config", str(config), "--out", "run", "--trainer.limit_val_batches=1"])
    taken = len(Segmentation(**TINY).model.body.state_dict())
    assert f"{taken} of the model's {taken} tensors taken" in capsys.readouterr().out


@pytest.mark.slow
def test_windows_over_a_large_image_stay_below_4_gb() -> None:
    assert in_fresh_process(memory_of_windows) < 4e9
