"""Detection: scores against pycocotools' own, what trains, what is refused."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchmetrics.detection import MeanAveragePrecision

from softmaxfree.data import DetectionData
from softmaxfree.data.scenes import Scenes, open_scenes
from softmaxfree.errors import UserError
from softmaxfree.models.build import BackboneConfig, build_model
from softmaxfree.tasks import Detection
from softmaxfree.tasks.coco_scores import NAMES, average_precision, detections
from softmaxfree.tasks.predict import run as predict
from softmaxfree.training.command import run

from ..data.test_scenes import open_real
from ..training.conftest import held_out

TINY: dict[str, Any] = {
    "num_classes": 10,
    "options": {"embed_dims": (16, 16, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)},
    "width": 16,
    "size": 64,
    "max_size": 64,
}
SURE_OF_ALL: dict[str, dict[str, Any]] = {
    "retinanet": {"score_thresh": 0.0, "detections_per_img": 20, "topk_candidates": 20},
    "mask_rcnn": {"box_score_thresh": 0.0, "box_detections_per_img": 20,
                  "rpn_post_nms_top_n_test": 20},
}  # fmt: skip
"""Untrained detectors are sure of nothing, and would find nothing."""


def guesses(scenes: Scenes, seed: int = 0) -> list[dict[str, Any]]:
    """Detections near the truth, some far from it, some of another class, as a detector's output
    put into COCO's format."""
    rng = np.random.default_rng(seed)
    results = []
    for index in range(len(scenes)):
        _, (boxes, labels, masks) = scenes.load(index)
        if not len(boxes):
            continue
        assert masks is not None
        sides = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
        noise = torch.from_numpy(rng.normal(size=boxes.shape)).float()
        wrong = torch.from_numpy(rng.random(len(labels)) < 0.2)
        found = {
            "boxes": boxes + 0.1 * sides * noise,
            "labels": torch.where(wrong, (labels + 1) % len(scenes.classes), labels),
            "scores": torch.from_numpy(rng.random(len(labels))).float(),
            "masks": torch.roll(masks, int(rng.integers(0, 9)), dims=2).unsqueeze(1).float(),
        }
        results += detections(found, scenes.image_ids[index], scenes.category_ids)
    return results


def by_pycocotools(annotations: Path, results: Path, kind: str) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(annotations)
        evaluation = COCOeval(truth, truth.loadRes(str(results)), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats.tolist()[:6]


def test_scores_are_pycocotools_own_on_coco(tmp_path: Path) -> None:
    scenes = open_real("coco", "coco_tiny", "val2017")
    results = guesses(scenes)
    (tmp_path / "results.json").write_text(json.dumps(results))
    ours = average_precision(scenes.ground_truth(), results, scenes.image_ids, masks=True)
    file = Path(os.environ["SOFTMAXFREE_DATA"]) / "coco_tiny/annotations/instances_val2017.json"
    for prefix, kind in (("", "bbox"), ("mask_", "segm")):
        expected = by_pycocotools(file, tmp_path / "results.json", kind)
        assert expected[0] > 0.1
        assert [ours[prefix + name] for name in NAMES] == pytest.approx(expected, abs=1e-6)


def test_scores_are_torchmetrics_too() -> None:
    """A second implementation of what goes into pycocotools, on data without files."""
    scenes = open_scenes("digit_scenes", None, "val")
    scenes.image_ids = scenes.image_ids[:20]
    results = guesses(scenes)
    ours = average_precision(scenes.ground_truth(), results, scenes.image_ids)
    metric = MeanAveragePrecision(box_format="xywh", iou_type="bbox")
    for index, number in enumerate(scenes.image_ids):
        mine = [entry for entry in results if entry["image_id"] == number]
        _, (boxes, labels, masks) = scenes.load(index)
        assert masks is not None
        boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
        metric.update(
            [{"boxes": torch.tensor([entry["bbox"] for entry in mine]),
              "scores": torch.tensor([entry["score"] for entry in mine]),
              "labels": torch.tensor([entry["category_id"] - 1 for entry in mine])}],
            [{"boxes": boxes, "labels": labels, "area": masks.sum((1, 2))}],
        )  # fmt: skip
    theirs = metric.compute()
    expected = {"AP": "map", "AP50": "map_50", "AP75": "map_75", "AP_S": "map_small"}
    for name, key in expected.items():
        assert ours[name] == pytest.approx(theirs[key].item(), abs=5e-4)  # its boxes are float32


def test_nothing_found_scores_nothing_and_unmeasurable_scores_are_left_out() -> None:
    scenes = open_scenes("digit_scenes", None, "val")
    scenes.image_ids = scenes.image_ids[:3]
    scores = average_precision(scenes.ground_truth(), [], scenes.image_ids)
    assert scores["AP"] == scores["AP50"] == 0
    assert "AP_L" not in scores  # no digit has 96 x 96 pixels


def configuration(folder: Path, detector: str, **data: Any) -> Path:
    path = folder / f"{detector}.yaml"
    path.write_text(yaml.safe_dump({
        "trainer": {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 2,
                    "limit_val_batches": 3, "enable_progress_bar": False, "log_every_n_steps": 1},
        "model": {"class_path": "softmaxfree.tasks.Detection", "init_args": {
            **TINY,
            "options": {name: [*value] for name, value in TINY["options"].items()},
            "detector": detector, "detector_options": SURE_OF_ALL[detector], "ema": 0.9}},
        "data": {"class_path": "softmaxfree.data.DetectionData", "init_args": {
            "batch_size": 2, "num_workers": 0, "sizes": [64, 80], "max_size": 80, **data}},
    }))  # fmt: skip
    return path


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_a_run_is_trained_scored_and_used(
    detector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run("fit", ["--config", str(configuration(tmp_path, detector)), "--out", "run"])
    printed = capsys.readouterr().out
    kind, prefix = ("masks", "mask_") if detector == "mask_rcnn" else ("boxes", "")
    told = json.loads(Path("run/run.json").read_text())["scores"]
    assert held_out(printed) == (f"held-out AP50 of {kind}: {told[f'{prefix}AP50'] * 100:.1f} %")
    assert {path.name for path in Path("run").iterdir()} == {
        "last.ckpt", "best.ckpt", "config.yaml", "run.json", "metrics.jsonl", "run.png",
        "example.png", ".lock",
    }  # fmt: skip

    run("validate", ["--checkpoint", "run/last.ckpt", "--model.results", "found.json"])
    printed = capsys.readouterr().out
    assert f"val/{prefix}AP50 " in printed
    results = json.loads(Path("found.json").read_text())
    assert {entry["image_id"] for entry in results} == {1, 2, 3}
    assert ("segmentation" in results[0]) == (detector == "mask_rcnn")
    scenes = open_scenes("digit_scenes", None, "val")
    again = average_precision(scenes.ground_truth(), results, [1, 2, 3], detector == "mask_rcnn")
    for name, value in again.items():
        assert told[name] == pytest.approx(value, abs=1e-7)

    other = Path("run/other/example.png")
    other.parent.mkdir()
    other.write_bytes(Path("run/example.png").read_bytes())
    predict([Path("run/example.png"), other], Path("run/last.ckpt"), threshold=0.0)
    first, second = map(json.loads, Path("predictions/found.jsonl").read_text().splitlines())
    assert (first["image"], second["image"]) == ("run/example.png", "run/other/example.png")
    objects = first["found"]
    assert len(objects) == 20
    assert {"class", "index", "score", "bbox"} <= objects[0].keys()
    assert [entry["score"] for entry in objects] == sorted(
        (entry["score"] for entry in objects), reverse=True
    )
    before = np.asarray(Image.open("run/example.png").convert("RGB").resize((512, 512), 0))
    for name in ("example.png", "example-2.png"):
        drawn = np.asarray(Image.open(Path("predictions") / name))
        assert drawn.shape == before.shape
        assert (drawn != before).any()

    predict([other], "run", threshold=0.0, out=Path("found.csv"))  # no pictures then
    header, row, *_ = Path("found.csv").read_text().splitlines()
    assert header == "image,class,index,score,x,y,width,height"
    numbers = [float(cell) for cell in row.split(",")[3:]]
    assert numbers == pytest.approx([objects[0]["score"], *objects[0]["bbox"]])

    with pytest.raises(ValueError, match="finds objects, and takes no --top"):
        predict([Path("run/example.png")], Path("run/last.ckpt"), top=3)
    with pytest.raises(ValueError, match="--threshold must be from 0 to 1, got 50"):
        predict([Path("run/example.png")], Path("run/last.ckpt"), threshold=50)


def quiet_trainer(**arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **arguments,
    )  # fmt: skip


def test_what_is_found_on_an_image_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    """Of images of different sizes, which a common batch would pad."""
    torch.manual_seed(0)
    task = Detection(**TINY, detector_options=SURE_OF_ALL["retinanet"]).eval()
    sizes = [(3, 64, 64), (3, 50, 90), (3, 90, 50)]
    images = [torch.randint(0, 256, size, dtype=torch.uint8) for size in sizes]
    with torch.no_grad():
        together, alone = task(images), [task([image])[0] for image in images]
    for one, other in zip(together, alone):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_backbone_or_detector_start_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = build_model(BackboneConfig("softpp_nano", options=TINY["options"]), 5)
    torch.save(trained.state_dict(), tmp_path / "backbone.pth")
    task = Detection(**TINY, init_checkpoint=str(tmp_path / "backbone.pth"))
    data = DetectionData(batch_size=2, num_workers=0, sizes=[64])
    quiet_trainer(max_steps=1, limit_val_batches=0).fit(task, datamodule=data)
    body = task.model.backbone.body
    taken = len(body.state_dict())
    assert f"{taken} of the model's {taken} tensors taken" in capsys.readouterr().out

    torch.save(task.state_dict(), tmp_path / "detector.pth")
    other = Detection(**TINY, init_checkpoint=str(tmp_path / "detector.pth"))
    quiet_trainer(limit_val_batches=1, num_sanity_val_steps=0).validate(other, datamodule=data)
    for name, tensor in task.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


def test_frozen_batch_normalisation_stays() -> None:
    task = Detection(**TINY, freeze=["backbone.body.*.bn"]).train()
    frozen = [m for m in task.model.backbone.body.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert frozen
    for module in frozen:
        assert not module.training
        assert not module.weight.requires_grad


@pytest.mark.parametrize("option", ["size", "max_size"])
@pytest.mark.parametrize("side", [-1, 0, 4097, 10**9])
def test_sides_that_images_cannot_have_are_refused(option: str, side: int) -> None:
    sentence = rf"--model\.{option} must be from 1 to 4096 pixels, got {side}"
    with pytest.raises(UserError, match=sentence):
        Detection(**(TINY | {option: side}))


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ({"detector": "mask_rcnn", "num_classes": 3}, {"name": "voc", "root": "bccd"},
         "the detector learns masks, but voc has none: give --model.detector retinanet"),
        ({"num_classes": 4}, {}, "the data has 10 classes in its train split"),
        ({}, {"name": "yolo"}, "there is no data set of scenes 'yolo'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_at_the_start(
    model: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    if data.get("root"):
        open_real("voc", "bccd", "train")
    task = Detection(**(TINY | model))
    with pytest.raises(ValueError, match=message):
        quiet_trainer(max_steps=1).fit(
            task, datamodule=DetectionData(**({"num_workers": 0, "batch_size": 2} | data))
        )
