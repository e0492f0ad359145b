import csv
import itertools
import json
import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from softmaxfree.lab.bench.contestants import PACKAGES, VARIANTS
from softmaxfree.lab.bench.sequences import attentions
from softmaxfree.lab.figures.cost import COMMANDS, draw_memory, draw_throughput
from softmaxfree.lab.paper import IMAGENET
from softmaxfree.lab.pictures import COLORS, MARKERS, points
from softmaxfree.layers.registry import _BUILT_IN

RESULTS = Path(__file__).parents[3] / "results"

MAIN = ["softpp", "soft", "softmax", "performer", "nystromformer", "linformer"]

# Machado, Oliveira, Fernandes (2009), severity 1, for linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def written(folder: Path, name: str) -> list[dict[str, str]]:
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / f"{name}.svg").read_text()
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def over_n(rows: list[dict[str, str]], panel: str, quantity: str) -> set[tuple[str, int, float]]:
    return {
        (row["contestant"], int(row["n"]), float(row[quantity]))
        for row in rows
        if row["panel"] == panel
    }


def measured(content: dict, quantity: str) -> set[tuple[str, int, float]]:
    return {
        (row["contestant"], row["n"], row[quantity]) for row in content["rows"] if quantity in row
    }


def test_memory_has_every_point_and_every_row_of_the_papers_table(tmp_path: Path) -> None:
    draw_memory(RESULTS, tmp_path)
    rows = written(tmp_path, "memory")
    assert over_n(rows, "memory", "training_bytes") == measured(result("memory"), "training_bytes")
    models = {row["model"]: row for row in rows if row["panel"] == "accuracy"}
    assert list(models) == [printed.title for printed in IMAGENET]
    for printed in IMAGENET:
        row = models[printed.title]
        assert float(row["top1"]) == printed.top1
        assert float(row["parameters_m"]) == pytest.approx(printed.parameters_m, rel=0.02)
        ours = printed.family in ("SOFT", "SOFT++")
        assert row["parameters_from"] == ("counted" if ours else "paper")


def test_throughput_has_every_point_and_the_models_with_an_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plt.Figure, "savefig", lambda *_, **__: None)  # as memory's, and slow
    draw_throughput(RESULTS, tmp_path)
    rows = list(csv.DictReader((tmp_path / "throughput.csv").read_text().splitlines()))
    plt.close("all")
    attention = result("attention-paper")
    for panel, quantity in (("forward", "forward_s"), ("training", "training_s")):
        assert over_n(rows, panel, quantity) == measured(attention, quantity)
    peers = {row["model"]: row for row in rows if row["panel"] == "peers"}
    assert set(peers) == {"SOFT++-S", "Swin-T", "ConvNeXt-T", "DeiT III-S", "ResNet-50"}
    for row in result("models-peers")["rows"]:
        if row["title"] in peers and row["side"] == 224:
            assert float(peers[row["title"]]["images_s"]) == pytest.approx(1 / row["inference_s"])
            (printed,) = (other for other in IMAGENET if other.model == row["model"])
            assert float(peers[row["title"]]["top1"]) == printed.top1
            assert row["parameters"] / 1e6 == pytest.approx(printed.parameters_m, rel=0.03)
    tiny = {row["contestant"]: row for row in rows if row["panel"] == "tiny"}
    assert set(tiny) == set(MAIN)
    for row in result("models-paper")["rows"]:
        if row["group"] == "softpp_tiny_fudan" and row["arguments"]["attention"] in tiny:
            drawn = tiny[row["arguments"]["attention"]]
            assert float(drawn["images_s"]) == pytest.approx(2 / row["inference_s"])
            assert float(drawn["top1"]) == row["paper"]["top1"]


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_missing_is_named_with_its_command(name: str, tmp_path: Path) -> None:
    results, out = tmp_path / "results", tmp_path / "figures"
    results.mkdir()
    for other in COMMANDS:
        shutil.copy(RESULTS / f"{other}.json", results)
    file = results / f"{name}.json"
    run = draw_memory if name in ("memory", "models") else draw_throughput

    def message() -> str:
        with pytest.raises(ValueError, match=file.name) as caught:
            run(results, out)
        return str(caught.value)

    again = f"; write it with: {COMMANDS[name]} --out {results}"
    file.unlink()
    assert message() == f"cannot read {file}: No such file or directory{again}"
    file.write_text("[1, 2")
    assert re.match(rf"{re.escape(str(file))} is not .*JSON", message())
    assert message().endswith(again)
    file.write_text(json.dumps({"schema_version": 1, "rows": [{"n": 1}]}))
    assert message() == f"{file} is a result of something else, or of an older version{again}"
    assert not out.exists()


def test_points_leave_out_what_was_not_measured() -> None:
    content = {
        "titles": {"soft": "SOFT", "gaussian": "Gaussian"},
        "rows": [
            {"contestant": "soft", "n": 1, "forward_s": 2.0},
            {"contestant": "soft", "n": 2, "forward_s": None},
            {"contestant": "gaussian", "n": 1, "forward_note": "out of memory"},
        ],
    }
    assert points(content, "forward_s") == {"soft": [(1, 2.0)]}


def lab(color: str, vision: np.ndarray) -> np.ndarray:
    """CIELAB, as somebody with that vision sees it."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(vision @ linear, 0, 1)
    to_xyz = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.0721750],
            [0.0193339, 0.1191920, 0.9503041],
        ]
    )
    xyz = to_xyz @ seen / to_xyz.sum(1)
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_are_told_apart_with_any_vision(vision: str) -> None:
    def closest(names: list[str]) -> float:
        seen = [lab(COLORS[name], VISIONS[vision]) for name in names]
        return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))

    assert closest(MAIN) > 15  # about 2 is the least that is seen at all
    assert closest(sorted(_BUILT_IN)) > 7
    others = [name for name in _BUILT_IN if name != "softpp"]
    assert min(closest(["softpp", name]) for name in others) > 15


def test_every_attention_has_a_colour_and_a_marker() -> None:
    assert COLORS.keys() == MARKERS.keys()
    assert {*_BUILT_IN, *VARIANTS, *PACKAGES, *attentions()} <= COLORS.keys()
    assert len({COLORS[name] for name in _BUILT_IN}) == len(_BUILT_IN)
    assert len({MARKERS[name] for name in _BUILT_IN}) == len(_BUILT_IN)
