"""The log of a run, and the table of several."""

import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from softmaxfree.errors import UserError
from softmaxfree.training.checkpoint import RunCheckpoint
from softmaxfree.training.log import LineLogger, read_metrics
from softmaxfree.training.report import describe_run, draw_run, origin
from softmaxfree.training.runs import compare_runs

from .conftest import SMALL, Fit


def test_a_log_cut_short_by_a_kill_is_read_and_appended_to(tmp_path: Path) -> None:
    logger = LineLogger(tmp_path)
    logger.log_metrics({"loss": 3.0}, step=0)
    logger.log_metrics({"loss": 2.0}, step=1)
    whole = logger.path.read_text()
    logger.path.write_text(whole + whole[:9])
    logger.log_metrics({"loss": 1.5}, step=1)
    assert read_metrics(logger.path) == {"loss": [(0, 3.0), (1, 1.5)]}


def test_a_resumed_run_writes_each_line_once(tmp_path: Path) -> None:
    logger, again = LineLogger(tmp_path), LineLogger(tmp_path, begin=2)
    for step in (0, 1, 1, 2, 3):  # the checkpoint of step 2 has logged it before
        logger.log_metrics({"loss": 1.0 / (step + 1)}, step)
    logger.path.write_bytes(logger.path.read_bytes()[:-5])
    for step in (1, 2, 3):  # step 1 was validated again
        again.log_metrics({"loss": 1.0 / (step + 1)}, step)
    lines = [json.loads(line) for line in logger.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]


def test_a_run_that_is_killed_after_a_checkpoint_loses_no_line(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RunCheckpoint._save_last
    words = ("--save_every=1", "--trainer.limit_val_batches=1", "--data.eval_sizes=[16]")

    def killed(self: RunCheckpoint, trainer: Trainer) -> None:
        save(self, trainer)
        if trainer.global_step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoint, "_save_last", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(*words)
    folder = fit(*words, "--checkpoint=last")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss_step" in line] == [0, 1, 2]


def test_finished_runs_are_compared(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [fit(out="one"), fit("--model.attention=linformer", "--seed_everything=7", out="two")]
    capsys.readouterr()
    compare_runs(folders, tmp_path / "tables")
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "tables/classification-runs.json").read_text())
    told = [json.loads((folder / "run.json").read_text()) for folder in folders]
    for row, run_told, attention, seed in zip(
        content["rows"], told, ("softpp", "linformer"), (3, 7)
    ):
        assert (row["attention"], row["seed"], row["threads"]) == (
            attention, seed, run_told["threads"]
        )  # fmt: skip
        assert row["minutes"] == pytest.approx(run_told["seconds"] / 60)
        assert row["scores"] == run_told["scores"]
        assert row["commit"] == run_told["commit"]
        assert f"{row['scores']['accuracy']['16']:.3f}" in printed
    assert "two" in (tmp_path / "tables/classification-runs.md").read_text()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no run"):
        compare_runs([tmp_path / "empty"], None)


def test_what_is_no_run_is_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two", "failed"):
        (tmp_path / name).mkdir()
    for name in ("one", "two"):
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(SMALL))
        describe_run(tmp_path / name, **origin(), seconds=90.0)
    compare_runs(sorted(tmp_path.iterdir()))
    several = capsys.readouterr()
    assert [line.split()[0] for line in several.out.splitlines()[2:]] == ["one", "two"]
    assert re.fullmatch(r"left out: .*failed holds no run \(.*\n", several.err)
    compare_runs([tmp_path])
    assert capsys.readouterr() == (several.out, "")


def test_runs_that_are_not_finished_are_shown_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SMALL))
    describe_run(tmp_path, **origin(), seconds=90.0)
    (tmp_path / ".lock").touch()
    compare_runs([tmp_path])
    assert capsys.readouterr().out.split()[-2:] == ["1.5", "unfinished"]
    script = "import fcntl; f = open('.lock', 'w'); fcntl.lockf(f, 2); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        compare_runs([tmp_path])
        process.communicate(b"\n")
    assert capsys.readouterr().out.split()[-2:] == ["1.5", "running"]


def set_in(parts: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    *above, last = place.split("/")
    inner = parts = json.loads(json.dumps(parts))
    for part in above:
        inner = inner[part]
    inner[last] = value
    return parts


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        ("config", "model/class_path", "/PLACE/canary"),
        ("config", "model/class_path", "a.b/../../canary"),
        ("config", "seed_everything", date(2026, 1, 1)),
        ("run", "scores", {"accuracy": "x"}),
        ("run", "scores", {"accuracy": [1]}),
        ("run", "hardware", 3),
        ("run", "commit", 3),
        ("run", "seconds", 10**400),
    ],
)
def test_files_that_fit_has_not_written_are_no_run(
    file: str, place: str, value: Any, tmp_path: Path
) -> None:
    """A task's name would be that of a file elsewhere; the others were tracebacks."""
    value = value.replace("/PLACE", str(tmp_path)) if isinstance(value, str) else value
    files = {"config": SMALL, "run": {**origin(), "seconds": 1.0}}
    files[file] = set_in(files[file], place, value)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(files["config"]))
    describe_run(tmp_path, **files["run"])
    with pytest.raises(UserError, match="holds no run") as caught:
        compare_runs([tmp_path], tmp_path / "tables" / "here")
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "run.json"}


def test_letters_that_steer_a_terminal_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {**origin(), "command": "\x1b[31m", "start": "\x1b[31m", "scores": {"accuracy": {}}}
    describe_run(tmp_path, **told, seconds=1.0)
    config = set_in(SMALL, "seed_everything", "\x1b[31m")
    config = set_in(config, "model/init_args/backbone", "\x1b[31m_")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    compare_runs([tmp_path], tmp_path)
    printed = capsys.readouterr().out + (tmp_path / "classification-runs.md").read_text()
    assert "\x1b" not in printed
    assert printed.count(r"\x1b[31m") == 9


def test_a_run_without_metrics_is_drawn_too(tmp_path: Path) -> None:
    assert draw_run(tmp_path, {"loss": ["train/loss"], "score": ["val/AP"]}, None).is_file()
