"""The measurement of segmenters: right numbers, whole files, notes that are true."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from softmaxfree.lab.bench import segmentation
from softmaxfree.lab.bench.runner import GROWING
from softmaxfree.lab.bench.segmentation import ComparedSegmenter, count, less_both, windows
from softmaxfree.lab.paper import SegmentationData, Segmenter
from softmaxfree.lab.results import read
from softmaxfree.models.build import BackboneConfig
from softmaxfree.models.cost import cost_of
from softmaxfree.models.segmenters import build_segmenter

from .test_bench import keep_threads  # noqa: F401
from .test_results import RESULTS

NANO = "softpp_nano"
SMALL = {"depths": (1, 1, 1, 1)}
FEW = SMALL | {"num_landmarks": 49}


@pytest.mark.slow
def test_segmenters_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contestants = [
        ComparedSegmenter("softpp_nano, 49 landmarks", "backbone", NANO, FEW, (32, 32)),
        ComparedSegmenter(segmentation.SWIN, "window", NANO, SMALL, (32, 32)),
        ComparedSegmenter(segmentation.SWIN, "windows", NANO, SMALL, (32, 48), 32, 16),
        ComparedSegmenter("softpp_nano, 49 landmarks", "image", NANO, FEW, (32, 48)),
    ]
    monkeypatch.setattr(segmentation, "SEGMENTERS", contestants)
    monkeypatch.setattr(segmentation, "REPEATS", 1)
    printed = {NANO: Segmenter(60, 237), "convnext_tiny": Segmenter(60, 235)}
    data = {"ADE20K": SegmentationData(150, 64, printed)}
    monkeypatch.setattr(segmentation, "SEGMENTATION", data)
    segmentation.bench_segmentation(out=tmp_path)

    content = json.loads((tmp_path / "segmentation.json").read_text())
    assert content["schema_version"] == 1
    assert content["threads"] == 1
    assert "commit" in content
    assert content["versions"]["torch"] == torch.__version__
    for row, contestant in zip(content["rows"], contestants, strict=True):
        assert row["title"] == contestant.title
        assert row["multiply_adds"] > row["inverse_multiply_adds"] > 0
        assert row["inference_bytes"] > 1e8
        assert row["inference_median_s"] >= row["inference_s"] > 0
        if contestant.what != "backbone":
            assert row["output"] == [19, *contestant.size]
    body, window, by_windows, whole = content["rows"]
    assert body["parameters"] < window["parameters"]
    assert body["multiply_adds"] < window["multiply_adds"] < whole["multiply_adds"]
    assert by_windows["multiply_adds"] == 2 * window["multiply_adds"]
    titles = [row["title"] for row in content["figures"]]
    assert titles == ["softpp_nano, 49 landmarks", "softpp_nano, ratios", "ConvNeXt-T"]
    with (tmp_path / "segmentation.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(contestants)

    written = (tmp_path / "segmentation.md").read_text().splitlines()
    printed = capsys.readouterr().out.splitlines()
    origin = f"`{content['command']}"
    lines = [x for x in written + printed if not x.startswith((origin, "written: "))]
    assert max(map(len, lines)) <= 100
    swin = [line.split("|") for line in written if f"| {segmentation.SWIN} " in line]
    assert [cells[-3].strip() for cells in swin] == ["1.00", "1.00"]


@pytest.mark.parametrize(
    ("backbone", "options", "side", "tolerance"),
    [
        pytest.param(NANO, FEW, 64, 1e-3, id="fixed number"),
        pytest.param(NANO, SMALL, 64, 1e-3, id="growing number"),
        pytest.param(NANO, SMALL, 192, 5e-3, id="solved, not inverted"),
        pytest.param("softx_nano", {}, 64, 5e-3, id="no inverse"),
        pytest.param("pvt_v2_b0", {}, 64, 0, id="no landmarks"),
    ],
)
def test_counted_from_shapes_as_when_computed(
    backbone: str, options: dict[str, Any], side: int, tolerance: float
) -> None:
    """But for the two columns that the computed kernel has for the tokens' squares."""
    whole, part, kernel = count(backbone, options, 19, (side, side))
    model = build_segmenter("upernet", 19, BackboneConfig(backbone, options=options))
    computed = cost_of(model, torch.zeros(1, 3, side, side))
    assert whole.parameters == computed.parameters
    assert whole.inverse == part.inverse == computed.inverse
    assert whole.multiply_adds == pytest.approx(computed.multiply_adds, rel=tolerance)
    body = cost_of(model.body, torch.zeros(1, 3, side, side))
    assert part.parameters == body.parameters
    decoder = computed.multiply_adds - body.multiply_adds
    assert whole.multiply_adds - part.multiply_adds == pytest.approx(decoder)
    assert kernel < part.multiply_adds - part.inverse


def test_windows_of_the_image() -> None:
    number = windows(segmentation.IMAGE, segmentation.WINDOW, segmentation.STEP)
    assert number == 8
    height, width = segmentation.IMAGE
    assert number * segmentation.WINDOW**2 == 2.25 * height * width


@pytest.mark.slow
def test_what_is_said_about_the_papers_figures() -> None:
    """Of the committed figures, the smallest of which are counted again."""
    rows = read(RESULTS / "segmentation.json")["figures"]
    assert len(rows) == 14
    for row in rows[:2]:
        again = count(row["backbone"], row["options"], row["classes"], tuple(row["size"]))[0]
        assert again.multiply_adds == row["multiply_adds"]
        assert again.parameters == row["parameters"]
    for row in rows:
        side = row["size"][0]
        paper_m, paper_g = row["paper_parameters_m"], row["paper_multiply_adds_g"]
        parameters = row["parameters"] / 1e6 / paper_m
        if not row["backbone"].startswith("softpp"):
            assert abs(parameters - 1) < 0.005
            assert abs(row["multiply_adds"] / 1e9 / paper_g - 1) < 0.005
            continue
        large = row["backbone"] == "softpp_large"
        assert 1 - 0.0215 < parameters < 1 - 0.0115
        with torch.device("meta"):
            model = build_segmenter("upernet", row["classes"], row["backbone"])
            classifier = _millions(timm.create_model(row["backbone"])) - _millions(model.body)
        assert model.auxiliary is not None
        assert round(_millions(model.auxiliary), 1) == (1.2 if large else 0.9)
        assert 0.75 < classifier < 1.05
        whole = row["parameters"] / 1e6 + classifier
        assert 0.985 < whole / paper_m < 0.992 if large else round(whole) == paper_m

        decoder = {512: (211, 212), 768: (473, 475)}[side][large]
        assert round(row["decoder_multiply_adds"] / 1e9) == decoder
        assert 0.645 < row["decoder_multiply_adds"] / row["multiply_adds"] < 0.905
        odd = large and side == 768
        found = row["multiply_adds"] / 1e9
        if "num_landmarks" in row["options"]:
            assert found < paper_g
        elif odd:
            assert abs(less_both(row) / 1e9 / 699 - 1) < 0.01
        else:
            assert found > paper_g
            assert abs(less_both(row) / 1e9 / paper_g - 1) < 0.01

    whole, _, kernel = count("softpp_small", GROWING, 19, (512, 1024))
    assert round((whole.multiply_adds - whole.inverse - kernel) / 1e9) == 480


def _millions(model: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6
