"""Sequences from the command line: trained, scored, gone on with; what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from softmaxfree.data import SequenceData
from softmaxfree.tasks import SequenceClassification
from softmaxfree.training.command import run
from softmaxfree.training.runs import compare_runs

from ..data.test_sequences import write_papers, write_reviews
from ..training.conftest import held_out

TINY: dict[str, Any] = {"dim": 16, "hidden": 16, "depth": 1, "length": 60, "warmup_steps": 1}


def configuration(folder: Path, model: dict[str, Any], data: dict[str, Any]) -> Path:
    path = folder / "sequences.yaml"
    path.write_text(yaml.safe_dump({
        "trainer": {"accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False,
                    "log_every_n_steps": 1},
        "model": {"class_path": "softmaxfree.tasks.SequenceClassification",
                  "init_args": {**TINY, **model}},
        "data": {"class_path": "softmaxfree.data.SequenceData", "init_args": {
            "batch_size": 2, "num_workers": 0, "max_length": 60, **data}},
    }))  # fmt: skip
    return path


@pytest.mark.parametrize("attention", ["softpp", "reformer"])
def test_listops_is_trained_and_scored(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    data = {"name": "listops", "train_samples": 6, "val_samples": 5}
    config = configuration(tmp_path, {"attention": attention, "num_classes": 10}, data)
    run("fit", ["--config", str(config)])
    folder = Path(f"runs/{attention}-listops")
    told = json.loads((folder / "run.json").read_text())
    printed = capsys.readouterr().out
    assert f"training {attention} from scratch (0.0 M parameters) on listops" in printed
    assert "predict with" not in printed
    assert held_out(printed) == f"held-out accuracy: {told['scores']['accuracy'] * 100:.2f} %"

    task = SequenceClassification(**TINY, attention=attention, num_classes=10).eval()
    task.load_state_dict(torch.load(folder / "last.ckpt", weights_only=True)["state_dict"])
    source = SequenceData(**data, max_length=60).open("val")
    right = 0
    for index in range(5):
        tokens, label = source.load(index)
        assert isinstance(tokens, torch.Tensor)
        with torch.no_grad():
            right += int(task.model(tokens[None]).argmax()) == label
    assert told["scores"]["accuracy"] == pytest.approx(right / 5)

    run("validate", ["--checkpoint", str(folder / "last.ckpt")])
    assert f"val/accuracy{'':12}{100 * right / 5:.2f} %" in capsys.readouterr().out
    compare_runs([folder], None)
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line[:4] == [folder.name, attention, "scratch", "0"]  # no backbone


def test_pairs_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    root = str(write_papers(tmp_path / "papers"))
    model = {"num_classes": 2, "vocabulary": 257, "pairs": True}
    config = configuration(tmp_path, model, {"name": "retrieval", "root": root})
    run("fit", ["--config", str(config), "--out", "run"])
    assert "held-out accuracy: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "text has 257 tokens, but the model has 32: give --model.vocabulary 257"),
        ({"vocabulary": 257, "length": 50}, "up to 60 tokens, but the model is built for 50"),
        (
            {"vocabulary": 257, "pairs": True},
            "samples of text are no pairs of sequences: give --model.pairs false",
        ),
        ({"vocabulary": 257, "warmup_epochs": 1}, "warm-up is given twice, as 1 epochs and as 1"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(
    model: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"name": "text", "root": str(write_reviews(tmp_path / "reviews"))}
    config = configuration(tmp_path, {"num_classes": 2, **model}, data)
    with pytest.raises(ValueError, match=message):
        run("fit", ["--config", str(config), "--out", "run"])
