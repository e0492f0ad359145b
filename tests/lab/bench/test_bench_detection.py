"""The measurement of detectors: right numbers, whole files, notes that are true."""

import csv
import json
from pathlib import Path

import pytest
import torch

from softmaxfree.lab.bench import detection
from softmaxfree.lab.paper import DETECTION
from softmaxfree.models.build import BackboneConfig
from softmaxfree.models.detectors import build_detector

from .test_bench import keep_threads  # noqa: F401

SIZE = (64, 90)
SMALL = {"depths": (1, 1, 1, 1)}


@pytest.mark.slow
def test_detectors_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = [
        (title, "softpp_nano", SMALL | options)
        for title, options in (
            ("softpp_nano, 49 landmarks", {"num_landmarks": 49}),
            (detection.SWIN, {}),
        )
    ]
    monkeypatch.setattr(detection, "BODIES", bodies)
    monkeypatch.setattr(detection, "SIZE", SIZE)
    monkeypatch.setattr(detection, "REPEATS", 1)
    printed = {"mask_rcnn": {"softpp_large": DETECTION["mask_rcnn"]["softpp_large"]}}
    monkeypatch.setattr(detection, "DETECTION", printed)
    detection.bench_detection(out=tmp_path)

    content = json.loads((tmp_path / "detection.json").read_text())
    assert content["schema_version"] == 1
    assert content["threads"] == 1
    assert "commit" in content
    assert content["versions"]["torch"] == torch.__version__
    assert [row["detector"] for row in content["rows"]] == ["retinanet"] * 2 + ["mask_rcnn"] * 2
    for row, (title, *_) in zip(content["rows"], bodies * 2, strict=True):
        model = build_detector(
            row["detector"], 80, BackboneConfig(row["backbone"], options=row["options"])
        )
        assert row["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        assert row["title"] == title
        assert row["multiply_adds"] > row["inverse_multiply_adds"] > 0
        assert row["inference_bytes"] > 1e8
        assert row["inference_median_s"] >= row["inference_s"] > 0
        assert row["objects"] == 0
    with (tmp_path / "detection.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(content["rows"])

    written = (tmp_path / "detection.md").read_text().splitlines()
    printed = capsys.readouterr().out.splitlines()
    origin = f"`{content['command']}"
    lines = [x for x in written + printed if not x.startswith((origin, "written: "))]
    assert max(map(len, lines)) <= 100
    swin = [line.split("|") for line in written if f"| {detection.SWIN} " in line]
    assert [cells[-3].strip() for cells in swin] == ["1.00", "1.00"]


@pytest.mark.parametrize("detector", detection.DETECTORS)
def test_multiply_adds_grow_with_the_image_and_parameters_do_not(detector: str) -> None:
    """Up to four times as many: those of Mask R-CNN's proposals hardly grow."""
    small, large = (
        detection.cost_of_detecting(
            detection.prepare_detector(detector, "softpp_nano", SMALL | {"num_landmarks": 49}, size)
        )
        for size in ((64, 64), (128, 128))
    )
    assert large.parameters == small.parameters
    assert 1.5 < large.multiply_adds / small.multiply_adds < 4.1


def test_the_image_is_measured_at_its_size() -> None:
    """Neither made larger nor smaller, only padded to whole strides."""
    model, image = detection.prepare_detector("retinanet", "softpp_nano", SMALL, SIZE).args
    images, _ = model.transform([image])
    assert images.image_sizes == [SIZE]
    assert images.tensors.shape[-2:] == (64, 96)


def test_what_is_said_about_the_papers_sizes() -> None:
    rows = {(row["detector"], row["backbone"]): row for row in detection.sizes()}
    assert len(rows) == 10
    kept = []
    for (_, backbone), row in rows.items():
        off = row["parameters"] / 1e6 / row["paper_m"] - 1
        if backbone == "softpp_tiny":
            assert 0.07 < off < 0.085
            continue
        assert -0.0275 < off < 0.0235
        assert round(row["classification"] / 1e6) == row["paper_classification_m"]
        assert 0.5e6 < row["classification"] - row["body"] < 1.03e6
        whole = row["parameters"] - row["body"] + row["classification"]
        kept.append(abs(whole / 1e6 - row["paper_m"]))
    assert sum(off < 0.5 for off in kept) == 5
    assert max(kept) < 1.3


@pytest.mark.slow
def test_an_untrained_mask_rcnn_has_1000_proposals_and_no_objects() -> None:
    _, backbone, options = detection.BODIES[0]
    call = detection.prepare_detector("mask_rcnn", backbone, options, detection.SIZE)
    proposals = []
    head = call.args[0].roi_heads.box_head
    head.register_forward_hook(lambda _, x, __: proposals.append(len(x[0])))
    assert call() == {"objects": 0}
    assert proposals == [1000]
