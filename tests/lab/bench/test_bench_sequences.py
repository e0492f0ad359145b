"""Measurements on long sequences: every attention, whole files; runs that are gone on with."""

import csv
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from softmaxfree.cli import main
from softmaxfree.errors import DivergedError, UserError
from softmaxfree.lab.bench import lra, sequences, trained
from softmaxfree.lab.bench.trained import TrainedRun

from .test_bench import keep_threads  # noqa: F401


def test_a_step_of_attentions_by_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sequences, "REPEATS", 1)
    monkeypatch.setattr(sequences, "LENGTHS", [64, 256])
    few = ["softpp", "softmax"]
    monkeypatch.setattr(sequences, "ATTENTIONS", few)
    monkeypatch.setattr(sequences, "OURS", ("softpp",))
    main(["bench", "sequences", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "sequences.json").read_text())
    measured = {(row["contestant"], row["n"]) for row in content["rows"]}
    names = {*few, "softpp_128"}
    assert measured == {(name, n) for name in names for n in (64, 256)}
    for row in content["rows"]:
        assert row["training_median_s"] >= row["training_s"] > 0
        assert row["training_bytes"] is not None
    assert content["exponents"].keys() == names
    printed = capsys.readouterr().out
    assert "softpp, window 4" in printed
    assert "softpp, 128 landmarks" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 100
    assert (tmp_path / "sequences.png").stat().st_size > 10_000
    assert "m-adds" not in (text := (tmp_path / "sequences.md").read_text())
    assert "one landmark of every 4" in text
    with (tmp_path / "sequences.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * len(names)


FEW = ["--trainer.max_steps=2", "--data.train_samples=32", "--data.val_samples=4",
       "--data.max_length=40", "--model.length=40", "--trainer.limit_train_batches=2"]  # fmt: skip


@pytest.mark.slow
def test_a_table_of_runs_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that failed is told of; those that are done are not trained again."""
    monkeypatch.chdir(tmp_path)
    command = ["bench", "lra", "--short", "true", "--tasks", "[listops]", "--out", "results"]

    def table(*words: str) -> str:
        main([*command, *words, "--fit", json.dumps(FEW)])
        return capsys.readouterr().out

    broken = Path("runs/lra/listops-soft-0")
    broken.mkdir(parents=True)
    (broken / "last.ckpt").write_text("torn")
    with pytest.raises(SystemExit):
        table("--contestants", "[softpp,soft]")
    assert "the run in runs/lra/listops-soft-0 ended with" in capsys.readouterr().err
    done = Path("runs/lra/listops-softpp-0/run.json").stat().st_mtime_ns
    (broken / "last.ckpt").unlink()

    printed = table("--contestants", "[softpp,soft]", "--workers", "2")
    assert Path("runs/lra/listops-softpp-0/run.json").stat().st_mtime_ns == done
    rows = json.loads(Path("results/lra.json").read_text())["rows"]
    assert [(row["attention"], row["seed"]) for row in rows] == [("soft", 0), ("softpp", 0)]
    for row in rows:
        assert row["setting"]["steps"] == 2
        assert row["peak_bytes"] > 1e8
        assert 0 < row["step_s"] < row["minutes"] * 60
        assert f"--model.attention={row['attention']}" in row["command"]
    line = next(line for line in printed.splitlines() if line.startswith("soft "))
    assert line.split()[2] == "37.4"  # the paper's
    text = Path("results/lra.md").read_text()
    cells = [line.split()[1::2] for line in text.splitlines() if line.startswith("| listops ")]
    assert cells[0][:6] == ["listops", "2", "16", "40", "32", "4"]

    with pytest.raises(SystemExit):
        main([*command, "--contestants", "[softpp]", "--fit", json.dumps([*FEW, "--model.dim=32"])])
    assert "listops-softpp-0 holds a run of another command" in capsys.readouterr().err

    config = Path("runs/lra/listops-softpp-0/config.yaml")
    config.write_text(config.read_text().replace("max_steps: 2", "max_steps: 7"))
    with pytest.raises(ValueError, match="steps is 2 in one and 7 in another"):
        lra.rows_in(Path("runs/lra"))


def test_a_run_that_a_signal_has_ended_is_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has saved its state, but has no scores."""
    run = TrainedRun(tmp_path / "run", ())

    def stopped(*_: Any, **__: Any) -> SimpleNamespace:
        run.folder.mkdir()
        (run.folder / "run.json").write_text('{"command": "softmaxfree fit"}')
        return SimpleNamespace(returncode=128 + signal.SIGTERM)

    monkeypatch.setattr(trained.subprocess, "run", stopped)
    with pytest.raises(UserError, match="was stopped before its end: repeat the command"):
        run.train(1)


def test_a_run_that_has_diverged_is_told_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = SimpleNamespace(returncode=DivergedError.exit_code)
    monkeypatch.setattr(trained.subprocess, "run", lambda *_, **__: status)
    with pytest.raises(
        DivergedError, match=r"the run in .*run ended with: nothing; see .*run\.log"
    ):
        TrainedRun(tmp_path / "run", ()).train(1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--contestants", "[softpp,sotf]"], "unknown attention 'sotf'"),
        (["--tasks", "[listops,image]"], "the data of image come from https://www.cs.toronto.edu"),
        (
            ["--short", "true", "--tasks", "[text,retrieval]"],
            "there are no short runs of retrieval, but of listops, text, image: leave out --short",
        ),
    ],
    ids=["attention", "data", "short"],
)
def test_what_is_not_there_is_refused_before_anything_is_trained(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOFTMAXFREE_DATA", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["bench", "lra", *words])
    assert sentence in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"attention": "soft", "options": {"num_landmarks": 8}, "seed": 1, "num_workers": 2}, ""),
        ({"dim": 32}, "dim is 64 in one and 32 in another"),
        ({"root": "listops"}, "root is None in one and listops in another"),
        ({"precision": "bf16-true"}, "precision is None in one and bf16-true in another"),
    ],
    ids=["attention", "model", "data", "trainer"],
)
def test_runs_that_differ_in_more_than_the_attention_are_not_put_side_by_side(
    changes: dict[str, Any], differing: str, tmp_path: Path
) -> None:
    config: dict[str, dict[str, Any]] = {
        "trainer": {"max_steps": 2, "precision": None},
        "model": {"attention": "softpp", "options": None, "length": 40, "lr": 0.1, "dim": 64,
                  "seed": 0},
        "data": {"name": "listops", "root": None, "max_length": None, "train_samples": None,
                 "val_samples": 4, "batch_size": 2, "num_workers": 0, "seed": 0},
    }  # fmt: skip
    names = ("command", "commit", "hardware", "versions", "threads", "seconds", "peak_bytes",
             "seconds_per_step")  # fmt: skip
    told = dict.fromkeys(names, 1) | {"scores": {"accuracy": 0.5}}
    for run, changed in (("a", {}), ("b", changes)):
        trainer, model, data = (
            {name: changed.get(name, value) for name, value in part.items()}
            for part in config.values()
        )
        given = {"trainer": trainer, "model": {"init_args": model}, "data": {"init_args": data}}
        (tmp_path / run).mkdir()
        (tmp_path / run / "run.json").write_text(json.dumps(told))
        text = yaml.safe_dump({"seed_everything": 0, **given})
        (tmp_path / run / "config.yaml").write_text(text)
    if not differing:
        assert len(lra.rows_in(tmp_path)) == 2
        return
    with pytest.raises(ValueError, match=f"runs of listops in .* cannot be compared: {differing}"):
        lra.rows_in(tmp_path)


def test_seeds_are_averaged_and_the_best_comes_first() -> None:
    rows = [
        {"task": task, "attention": attention, "seed": seed, "accuracy": accuracy,
         "step_s": 0.5 + seed, "peak_bytes": 2e9}
        for attention, seed, task, accuracy in (
            ("softmax", 0, "text", 0.60), ("softpp", 0, "text", 0.61), ("softpp", 1, "text", 0.63),
            ("softpp", 0, "image", 0.40),
        )
    ]  # fmt: skip
    accuracy, cost = lra.tables({"rows": rows})
    assert accuracy.rows == [
        ["softpp", "62.0±1.0", "-", "40.0", "-", "51.0"],
        ["softmax", "60.0", "65.0", "-", "38.2", "-"],
    ]
    assert cost.rows[0] == ["softpp", "500", "500", "2000", "2000"]
