"""`softmaxfree figures heatmap`: rows of the attention matrices, and the cross at the query."""

import csv
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image
from torch import Tensor

from softmaxfree import attention_rows
from softmaxfree.cli import main
from softmaxfree.lab.figures import heatmap
from softmaxfree.lab.figures.subject import given_images, subjects
from softmaxfree.layers.registry import ATTENTIONS

from ...analysis.test_rows import matrix
from .conftest import WriteCheckpoint


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is not square, of a name that is no part of a file's as it is."""
    path = tmp_path_factory.mktemp("images") / "a cat.v2.png"
    pixels = torch.randint(256, (24, 40, 3), generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(path)
    return path


def written(folder: Path, name: str) -> list[dict[str, str]]:
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / f"{name}.svg").read_text()
    return list(csv.DictReader((folder / f"{name}.csv").read_text().splitlines()))


def maps(rows: list[dict[str, str]]) -> Tensor:
    """(heads, H, W) of the rows of one model."""
    shape = [1 + max(int(row[name]) for row in rows) for name in ("head", "row", "column")]
    found = torch.full(shape, torch.nan)
    for row in rows:
        place = tuple(int(row[name]) for name in ("head", "row", "column"))
        found[place] = float(row["weight"])
    assert len(rows) == found.numel()
    return found


@pytest.mark.parametrize("layer", [0, -1], ids=["first", "after a class token"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_weights_are_those_of_the_matrix(
    name: str, layer: int, write_checkpoint: WriteCheckpoint
) -> None:
    (subject,) = subjects([write_checkpoint(name)], size=32)
    (image,) = given_images(None, 1).values()
    found = heatmap.heatmap(subject, image, (0.3, 0.9), layer)
    tensor = subject.classifier.tensor(image)
    rows = attention_rows(subject.classifier.model, tensor, found.query, layer)
    torch.testing.assert_close(found.weights, rows)
    torch.testing.assert_close(maps([_text(row) for row in found.rows()]), rows)
    record = list(subject.record(image).values())[layer]
    expected = matrix(record)[0, :, record.token(*found.query)]
    torch.testing.assert_close(found.weights, record.on_grid(expected), atol=1e-5, rtol=1e-3)
    reduced = name == "spatial_reduction" and layer == 0
    assert found.grid == ((16, 16) if layer == 0 else (2, 2))
    assert found.weights.shape == (2 + abs(layer), *((4, 4) if reduced else found.grid))


def _text(row: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in row.items()}


def test_the_command_draws_models_side_by_side(
    tmp_path: Path, write_checkpoint: WriteCheckpoint, picture: Path
) -> None:
    ckpts = [write_checkpoint(name) for name in ("softpp", "softmax", "nystromformer")]
    main(
        [
            *("figures", "heatmap", "--checkpoints", f"[{','.join(map(str, ckpts))}]"),
            *("--images", f"[{picture}]", "--place", "[0.2,0.8]"),
            *("--layer", "stages.1.blocks.0.attention", "--out", str(tmp_path)),
        ]
    )
    assert len(list(tmp_path.iterdir())) == 3
    rows = written(tmp_path, "heatmap-a-cat-v2")
    titles = list(dict.fromkeys(row["model"] for row in rows))
    assert titles == ["SOFT++", "softmax", "Nyströmformer"]
    assert {row["layer"] for row in rows} == {"stages.1.blocks.0.attention"}
    assert {(row["query_row"], row["query_column"]) for row in rows} == {("0", "3")}  # of 4 x 4
    for ckpt, title in zip(ckpts, titles):
        (subject,) = subjects([ckpt])
        tensor = subject.classifier.tensor(Image.open(picture))
        expected = attention_rows(subject.classifier.model, tensor, (0, 3), 1)
        found = maps([row for row in rows if row["model"] == title])
        torch.testing.assert_close(found, expected)


def test_the_cross_is_in_the_middle_of_the_patch(write_checkpoint: WriteCheckpoint) -> None:
    found = subjects([write_checkpoint(name) for name in ("softpp", "spatial_reduction")])
    (image,) = given_images(None, 1).values()
    drawn = [heatmap.heatmap(subject, image, (0.26, 0.99), 0) for subject in found]
    assert [one.query for one in drawn] == [(2, 7)] * 2  # of 8 x 8
    figure = heatmap.draw(drawn, "digit")
    crosses = [line for ax in figure.axes for line in ax.lines]
    plt.close(figure)
    assert len(crosses) == 2 * (1 + 2)
    for cross in crosses:
        assert cross.get_marker() == "+"
        assert (*cross.get_xdata(), *cross.get_ydata()) == pytest.approx((7.5 / 8, 2.5 / 8))


def test_many_heads_of_one_model_make_no_ribbon(write_checkpoint: WriteCheckpoint) -> None:
    (subject,) = subjects([write_checkpoint("softpp")])
    (image,) = given_images(None, 1).values()
    one = heatmap.heatmap(subject, image, (0.5, 0.5), -1)
    figure = heatmap.draw([one._replace(weights=one.weights[:1].repeat(10, 1, 1))], "name-" * 20)
    figure.canvas.draw()
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["SOFT++", *(f"head {head}" for head in range(10))]
    assert 1 / 2 < figure.bbox.width / figure.bbox.height < 2
    (title,) = [text for text in figure.texts if "attends to" in text.get_text()]
    assert one.layer in title.get_text().replace("\n", "")
    box = title.get_window_extent()
    assert figure.bbox.contains(box.x0, box.y0)
    assert figure.bbox.contains(box.x1, box.y1)
    plt.close(figure)


def test_ranges_are_said_with_what_is_below_0_or_not_finite(
    write_checkpoint: WriteCheckpoint,
) -> None:
    (subject,) = subjects([write_checkpoint("soft")])
    (image,) = given_images(None, 1).values()
    one = heatmap.heatmap(subject, image, (0.5, 0.5), 0)
    one.weights[0, 0, 0], one.weights[0, 1, 0] = -0.25, 3
    one.weights[1] = 0.00012
    one.weights[1, 0, 0] = torch.nan
    figure = heatmap.draw([one], "digit")
    texts = [
        text.get_text() for ax in figure.axes for inset in ax.child_axes for text in inset.texts
    ]
    plt.close(figure)
    assert texts == ["\N{MINUS SIGN}0.25", "3", "1.2e-4", "1.2e-4 (not all finite)"]


def test_files_of_one_name_have_figures_of_their_own(
    tmp_path: Path,
    write_checkpoint: WriteCheckpoint,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heatmap, "draw", lambda maps, name: plt.figure())
    same = tmp_path / "a cat v2.png"
    Image.open(picture).rotate(90).save(same)
    ckpts = [write_checkpoint("softpp"), write_checkpoint("softpp", "other run")]
    heatmap.draw_heatmap(ckpts, [picture, same, picture], (0.5, 0.5), 0, None, tmp_path / "out")
    stems = {path.stem for path in (tmp_path / "out").iterdir()}
    assert stems == {"heatmap-a-cat-v2", "heatmap-a-cat-v2-2", "heatmap-a-cat-v2-3"}
    rows = written(tmp_path / "out", "heatmap-a-cat-v2")
    assert {row["model"] for row in rows} == {"SOFT++ (run-softpp)", "SOFT++ (other run-softpp)"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--place", "[0.5,1.5]"], "--place must be two fractions of the image"),
        (["--layer", "9"], "SOFT++: layer must be a name or a number from -4 to 3, got 9"),
        (["--layer", "stages.9"], "there is no layer 'stages.9'; choose one of stages.0.blocks"),
        (["--images", "[]"], "--images is empty; name files, or leave it out for digits"),
        (["--images", "[none.png]"], "none.png cannot be read as an image: there is no such file"),
        (["--size", "0"], "--size must be from 1 to 4096 pixels, got 0"),
        (["--checkpoints", "[]"], "--checkpoints is empty; name files"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(
    options: list[str],
    message: str,
    write_checkpoint: WriteCheckpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ckpts = ["--checkpoints", f"[{write_checkpoint('softpp')}]"]
    with pytest.raises(SystemExit):
        main(["figures", "heatmap", *ckpts, "--out", str(tmp_path), *options])
    assert re.search(re.escape(message), capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
