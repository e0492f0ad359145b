"""`softmaxfree predict` on files, folders and patterns, with weights that come with the package."""

import csv
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from softmaxfree.cli import main
from softmaxfree.data.sources import Digits
from softmaxfree.models.weights import find_weights
from softmaxfree.tasks import predict as command
from softmaxfree.tasks.predict import Classifier
from softmaxfree.tasks.predict import run as predict

WEIGHTS = "digits-softpp"


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven digits in a folder, in one below it, and one in capitals."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    (folder / "below").mkdir(parents=True)
    digits = Digits("val")
    for index in range(7):
        name = f"below/{index}.png" if index < 3 else f"{index}.{'PNG' if index == 6 else 'png'}"
        digits.load(index)[0].save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_folder_is_predicted_in_batches_as_images_alone_are(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "MOST_AT_ONCE", 3)
    predict(["photos"], WEIGHTS, out=Path("found.jsonl"))
    printed = capsys.readouterr().out
    assert "%" not in printed
    assert printed.endswith("written: found.jsonl\n")
    found = lines("found.jsonl")
    assert [Path(line["image"]).stem for line in found] == ["3", "4", "5", "6", "0", "1", "2"]
    classifier = Classifier(find_weights(WEIGHTS))
    for line in found:
        image = Image.open(line["image"]).convert("RGB")
        with torch.no_grad():
            expected = classifier.model(classifier.tensor(image)).softmax(1)[0]
        numbers = [entry["index"] for entry in line["found"]]
        assert numbers == expected.topk(5).indices.tolist()
        assert [entry["probability"] for entry in line["found"]] == pytest.approx(
            expected[numbers].tolist(), abs=1e-5
        )
        assert [entry["class"] for entry in line["found"]] == [str(n) for n in numbers]


def test_a_pattern_to_csv(photos: Path) -> None:
    words = ["predict", "photos/**/[0-2].png", "photos/3.png", "photos/3.png", "--top", "1"]
    main([*words, "--checkpoint", "softpp_nano.cifar10", "--device", "cpu", "--out", "found.csv"])
    with open("found.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [
        *(f"photos/below/{n}.png" for n in range(3)), "photos/3.png"
    ]  # fmt: skip
    classes = find_weights("softpp_nano.cifar10").classes
    assert all(row["class"] == classes[int(row["index"])] for row in rows)
    assert "cat" in classes
    assert all(0 < float(row["probability"]) <= 1 for row in rows)


def test_an_image_that_cannot_be_read_does_not_stop_the_others(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "4.png").write_bytes((photos / "5.png").read_bytes()[:40])
    with pytest.raises(SystemExit) as stop:
        main(["predict", "photos", "gone.png", "--checkpoint", WEIGHTS, "--out", "found.jsonl"])
    assert stop.value.code == 1
    _, *errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "photos/4.png cannot be read as an image" in errors[0]
    assert "gone.png" in errors[1]
    assert errors[2] == (
        "softmaxfree: error: 2 of 8 images could not be read, see above; the others are done"
    )
    assert len(lines("found.jsonl")) == 6


def test_the_command_says_what_the_model_knows(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It calls a plain red image a digit too, with whatever probability."""
    Image.new("RGB", (40, 30), "red").save("red.png")
    predict(["red.png"], WEIGHTS, top=2)
    printed = capsys.readouterr()
    assert printed.err.strip() == (
        "digits-softpp knows 10 classes and nothing else: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9. "
        "Probabilities compare these classes; they do not tell whether an image shows any of them."
    )
    name, *classes = printed.out.splitlines()  # results alone, for a pipe
    assert name == "red.png"
    assert len(classes) == 2


def test_a_terminal_shows_progress(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    predict(["photos"], WEIGHTS, out=Path("found.csv"))
    assert "/7 [" in sys.stderr.getvalue()


def test_a_photograph_of_any_name_is_predicted_upright(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    name = os.fsdecode(b"caf\xe9.png")
    Image.open(photos / "3.png").rotate(90).save(name, exif=exif)
    words = ["predict", "photos/3.png", name, "--checkpoint", WEIGHTS]
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="utf-8"))
    main(words)
    assert b"caf\\udce9.png" in output.getvalue()
    main([*words, "--out", "found.jsonl"])
    upright, turned = lines("found.jsonl")
    assert turned["found"] == upright["found"]
    main([*words, "--out", "found.csv"])
    assert b"caf\xe9.png," in Path("found.csv").read_bytes()


@pytest.mark.parametrize("size", [-3, 0, 100_000])
def test_sides_that_images_cannot_have_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"--size must be from 1 to 4096 pixels, got {size}"):
        predict([], "none.ckpt", size=size)
