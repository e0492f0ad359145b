"""`softmaxfree figures resolution`: accuracy over sizes, and what foretells it."""

import csv
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

from softmaxfree import diagnose
from softmaxfree.cli import main
from softmaxfree.data.image_files import read_image
from softmaxfree.data.sources import Digits, Source, open_source
from softmaxfree.lab.figures import resolution
from softmaxfree.lab.figures.subject import Subject, given_images, subjects

from ...data.folders import write_digits
from .conftest import WriteCheckpoint

SIZES = [8, 16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10 held-out digits as files, and one that is none."""
    root = write_digits(tmp_path_factory.mktemp("digits"), train=10, val=10)
    (root / "val" / "7" / "broken.png").write_bytes(b"no image")
    return root


def one_by_one(subject: Subject, size: int, root: Path) -> float:
    """The accuracy of `Classifier.top` over the files."""
    subject.classifier.size = size
    files = [path for path in root.glob("val/*/*.png") if path.stem != "broken"]
    assert len(files) == 10
    prepared = torch.cat([subject.classifier.tensor(read_image(path)) for path in files])
    top = subject.classifier.top(prepared, 1)
    found = [entry["class"] == path.parent.name for path, (entry,) in zip(files, top)]
    return sum(found) / len(found)


def test_the_command_scores_draws_and_tells(
    tmp_path: Path,
    write_checkpoint: WriteCheckpoint,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ckpts = [write_checkpoint(name) for name in ("softpp", "soft", "softmax")]
    main(
        [
            *("figures", "resolution", "--checkpoints", f"[{','.join(map(str, ckpts))}]"),
            *("--sizes", "[16,8]", "--root", str(folder), "--out", str(tmp_path)),
        ]
    )
    told = capsys.readouterr().out
    assert len(re.findall("skipped .*broken.png, which cannot be read", told)) == 1
    assert (tmp_path / "resolution.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "resolution.svg").read_text()
    rows = list(csv.DictReader((tmp_path / "resolution.csv").read_text().splitlines()))
    titles = ["SOFT++", "SOFT", "softmax"]
    assert [(r["model"], int(r["size"])) for r in rows] == [(t, s) for t in titles for s in SIZES]
    found = dict(zip(titles, subjects(ckpts)))
    for row in rows:
        expected = one_by_one(found[row["model"]], int(row["size"]), folder)
        assert float(row["accuracy"]) == pytest.approx(expected)
        assert row["images"] == "10"
        assert f"{100 * expected:.2f} %" in told
        assert (row["growth"] == "") == (row["model"] == "softmax")
        if row["size"] == "16" and row["growth"]:
            assert float(row["growth"]) == 1
    strength = {row["model"]: float(row["growth"]) for row in rows[:4] if row["size"] == "8"}
    assert strength["SOFT"] < strength["SOFT++"]


def test_accuracy_does_not_depend_on_the_batch(
    write_checkpoint: WriteCheckpoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = subjects([write_checkpoint("softpp"), write_checkpoint("performer")])
    source = open_source("", str(folder), "val")
    assert isinstance(source, Source)

    def scores() -> object:
        return resolution.scored(found, [[16], [20]], source)[0]

    whole = scores()
    monkeypatch.setattr(resolution, "_PIXELS", 3 * 16**2)
    assert scores() == whole


def test_growth_is_that_of_a_diagnosis(write_checkpoint: WriteCheckpoint) -> None:
    (subject,) = subjects([write_checkpoint("soft")])
    images = list(given_images(None, 3).values())
    found = resolution.growth(subject, 48, images)
    tensors = torch.cat([subject.classifier.tensor(image, 48) for image in images])
    with pytest.warns(UserWarning, match="at 48 x 48 pixels attention is"):
        layers = diagnose(subject.classifier.model, tensors, 16).layers
    growths = torch.tensor([layer.growth for layer in layers])
    assert found["growth_lowest"] == pytest.approx(growths.min().item())
    assert found["growth_highest"] == pytest.approx(growths.max().item())
    assert found["growth"] == pytest.approx(growths.prod().item() ** (1 / len(layers)))
    (softx,) = subjects([write_checkpoint("softx")])
    assert resolution.growth(softx, 48, images) == {}


def test_the_figure_has_a_line_for_each_model_and_the_training_size(
    write_checkpoint: WriteCheckpoint,
) -> None:
    ckpts = [
        write_checkpoint("softpp"),
        write_checkpoint("softpp", "b"),
        write_checkpoint("softmax"),
    ]
    found = subjects(ckpts)
    strength = {"growth": 1.5, "growth_lowest": 1.0, "growth_highest": 2.0}
    rows = [
        {"model": subject.title, "size": size, "accuracy": size / 32} | (strength if i < 2 else {})
        for i, subject in enumerate(found)
        for size in SIZES
    ]
    figure = resolution.drawn(found, rows)
    upper, lower = figure.axes
    lines = {line.get_label(): line for line in upper.lines if line.get_label()[0] != "_"}
    assert list(lines) == [subject.title for subject in found]
    for line in lines.values():
        assert list(line.get_xdata()) == SIZES
        assert list(line.get_ydata()) == [100 * size / 32 for size in SIZES]
    same, other, softmax = lines.values()
    assert same.get_color() == other.get_color() != softmax.get_color()
    assert same.get_linestyle() != other.get_linestyle()
    assert "trained at 16" in [text.get_text().strip() for text in lower.texts]
    assert "pixels" in lower.get_xlabel()
    assert "%" in upper.get_ylabel()
    assert len(resolution.drawn(found[2:], rows[4:]).axes) == 1
    plt.close("all")


def test_sizes_are_those_that_the_model_takes(
    write_checkpoint: WriteCheckpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    softpp, linformer = subjects([write_checkpoint("softpp"), write_checkpoint("linformer")])
    assert resolution._sizes(softpp, None) == [8, 12, 16, 20, 24, 32, 48, 64]
    assert resolution._sizes(linformer, None) == [8, 12, 16, 20, 24, 32]
    assert "left out of Linformer, which does not take them: 48, 64" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"Linformer takes no images of 40 x 40 pixels \(Linf.*40"):
        resolution._sizes(linformer, [16, 40])
    for sizes in ([0, 16], []):
        with pytest.raises(ValueError, match="--sizes must be sides of 1 pixel or more, got"):
            resolution._sizes(softpp, sizes)


def test_classes_go_by_their_names(write_checkpoint: WriteCheckpoint) -> None:
    (turned,) = subjects([write_checkpoint("softpp", "turned", list("9876543210"))])
    assert resolution._class_numbers(turned, Digits("val")) == list(range(9, -1, -1))
    (pets,) = subjects([write_checkpoint("softpp", "pets", ["cat", "dog", "eel", "fox"])])
    message = r"SOFT\+\+ knows no class '0' of the data; .* one of its classes, such as 'cat'"
    with pytest.raises(ValueError, match=message):
        resolution._class_numbers(pets, Digits("val"))


def test_data_that_are_not_there_or_all_broken(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOFTMAXFREE_DATA", raising=False)
    ckpts = [write_checkpoint("softpp")]
    with pytest.raises(ValueError, match=r"there is no folder nowhere: give .* with --root"):
        resolution.draw_resolution(ckpts, [16], "nowhere", "val", tmp_path)
    (tmp_path / "val" / "3").mkdir(parents=True)
    (tmp_path / "val" / "3" / "broken.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="none of the 1 images can be read"):
        resolution.draw_resolution(ckpts, [16], str(tmp_path), "val", tmp_path)
