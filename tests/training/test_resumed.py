"""Going on with a run: with what it was told, from a sound file, alone in its folder."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace

from softmaxfree.errors import UserError
from softmaxfree.files import append
from softmaxfree.training.command import run
from softmaxfree.training.folder import RunLock, folder_of_run
from softmaxfree.training.log import read_metrics
from softmaxfree.training.report import continued
from softmaxfree.training.resumed import MAY_CHANGE, changes, resumption
from softmaxfree.training.runs import describe

from ..test_checkpoint_files import flip
from .conftest import Fit
from .schedules import Kill, Plan, differences, forked, outcome, unbroken

OTHERS = {
    "model.backbone": "soft_nano", "model.optimizer": "sgd", "model.ema": 0.5, "model.lr": 0.5,
    "model.options": {"inverse": "newton"}, "data.batch_size": 64, "data.size": 24,
    "seed_everything": 9, "trainer.limit_train_batches": 2, "trainer.max_epochs": 0,
    "trainer.max_steps": 2, "trainer.val_check_interval": 2,
}  # fmt: skip


def test_a_resumed_run_is_the_run_it_was(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fit()
    with pytest.raises(UserError, match=r"with --model.lr 0.001 \(given: 0.5\), --data.size 16 \("):
        fit("--checkpoint=last", "--model.lr=0.5", "--data.size=24")
    text = (folder / "config.yaml").read_text()
    assert resumption(folder / "last.ckpt", text)["changed"] == {}
    for name in MAY_CHANGE:
        section, _, key = name.rpartition(".")
        part = yaml.safe_load(text)
        part = part[section] if section else part
        assert key in part.get("init_args", part), f"fit has no option --{name}"
    for name, value in OTHERS.items():
        config = yaml.safe_load(text)
        section, _, key = name.rpartition(".")
        part = config[section] if section else config
        part.get("init_args", part)[key] = value
        with pytest.raises(UserError, match=f"was trained with --{name} ") as caught:
            resumption(folder / "last.ckpt", yaml.safe_dump(config))
        assert "a new run from its weights with --model.init_checkpoint" in str(caught.value)
        assert "\n" not in str(caught.value)

    allowed = ("--trainer.max_epochs=2", "--data.eval_batch_size=50", "--save_every=7")
    before = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**before, "seconds": 1000}))
    capsys.readouterr()
    fit("--checkpoint=last", *allowed)
    assert capsys.readouterr().out.startswith("resuming run at step 3 (")
    after = json.loads((folder / "run.json").read_text())
    assert after["command"] == before["command"]
    assert after["seconds"] > 1000 + 3 * after["seconds_per_step"]
    assert [step for step, _ in read_metrics(folder / "metrics.jsonl")["train/loss_step"]] == [
        0, 1, 2, 3, 4, 5
    ]  # fmt: skip
    (told,) = after["resumed"]
    assert told["versions"] == after["versions"]
    assert {name: told[name] for name in ("from", "step", "changed")} == {
        "from": "last.ckpt",
        "step": 3,
        "changed": {
            "save_every": [500, 7],
            "trainer.max_epochs": [1, 2],
            "data.eval_batch_size": [None, 50],
        },
    }
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 6


def test_a_run_goes_on_in_its_own_folder_or_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOFTMAXFREE_RUN", raising=False)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "last.ckpt").touch()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    given = str(tmp_path / "one" / "last.ckpt")
    for name in ("one", "link", "empty"):
        folder = folder_of_run(Namespace(checkpoint=given, out=tmp_path / name))
        assert folder == tmp_path / name
    with pytest.raises(UserError, match="other holds a run already"):
        folder_of_run(Namespace(checkpoint=given, out=tmp_path / "other"))


def test_names_are_those_of_the_command_line() -> None:
    model = {"class_path": "a.A", "init_args": {"lr": 1, "options": None}}
    other = {"class_path": "a.B", "init_args": {"lr": 2, "options": {}, "new": 1}}
    was, now = {"seed_everything": 1, "model": model}, {"seed_everything": 2, "model": other}
    assert changes(was, now) == {"seed_everything": [1, 2], "model": ["a.A", "a.B"],
                                 "model.lr": [1, 2]}  # fmt: skip
    assert not any("init_args" in name for name in MAY_CHANGE)


def test_a_damaged_checkpoint_is_not_trained_on_or_scored(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit("--save_every=1")
    told = json.loads((folder / "run.json").read_text())["scores"]
    middle = (folder / "last.ckpt").stat().st_size // 2
    flip(folder / "last.ckpt", *range(middle, middle + 64))
    capsys.readouterr()
    run("validate", ["--checkpoint=run/last.ckpt"])
    line = "the checkpoint before it, run/previous.ckpt, is taken"
    assert capsys.readouterr().err.count(line) == 1

    fit("--save_every=1", "--checkpoint=last")
    assert capsys.readouterr().err.count(line) == 1
    again = json.loads((folder / "run.json").read_text())
    assert again["scores"] == told
    assert [(entry["from"], entry["step"]) for entry in again["resumed"]] == [("previous.ckpt", 2)]

    (folder / "best.ckpt").write_bytes(b"")
    with pytest.raises(UserError, match=r"best.ckpt cannot be read as a checkpoint"):
        run("validate", ["--checkpoint=run/best.ckpt"])
    with pytest.raises(UserError, match=r"best.ckpt cannot be read as a checkpoint"):
        fit("--model.init_checkpoint=run/best.ckpt", out="new")


def test_a_damaged_checkpoint_never_takes_the_place_of_a_sound_one(tmp_path: Path) -> None:
    plan = Plan(batches=4, max_epochs=2, save_every=1)
    forked(plan, tmp_path, Kill("last.ckpt 3"))
    flip(tmp_path / "last.ckpt", *range(2000, 2064))
    forked(plan, tmp_path, Kill("last.ckpt 3"))  # goes on from step 2
    steps = [torch.load(tmp_path / name, weights_only=True)["global_step"]
             for name in ("previous.ckpt", "last.ckpt")]  # fmt: skip
    assert steps == [2, 3]
    assert forked(plan, tmp_path) == 0
    assert differences(unbroken(plan), outcome(tmp_path)) == []


@contextmanager
def another_process(folder: Path) -> Iterator[int]:
    """One that holds the lock, and has a child that outlives it."""
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        RunLock(folder)
        os.fork()
        os.write(told, b".")
        os.close(told)
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    try:
        os.read(ready, 1)
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_runs_cannot_share_a_folder(fit: Fit, tmp_path: Path) -> None:
    with another_process(tmp_path / "run") as process:
        with pytest.raises(
            UserError,
            match=rf"run is being written to by another run \(process {process} on .*\): "
            "wait for its end, or give another folder with --out",
        ):
            fit()
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    RunLock(tmp_path / "run").release()  # at once: it ended with its process


def test_a_run_that_has_ended_meanwhile_is_not_written_over(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that start in an empty folder one may end before the other has the lock."""

    def lock_after_the_other(folder: Path) -> RunLock:
        folder.mkdir()
        (folder / "last.ckpt").write_text("the other's")
        return RunLock(folder)

    monkeypatch.setattr("softmaxfree.training.command.RunLock", lock_after_the_other)
    with pytest.raises(UserError, match="run holds a run already: give --checkpoint last"):
        fit()
    assert (tmp_path / "run" / "last.ckpt").read_text() == "the other's"
    RunLock(tmp_path / "run").release()


WHOLE: dict[str, Any] = {
    "state_dict": {"a": torch.ones(1)}, "current_model_state": {"a": torch.ones(1)},
    "averaging_state": {"a": 1},
    "callbacks": {"RunCheckpoint": {"a": 1}, "MovingAverage": {"a": 1}},
    "loops": {"fit_loop": {"epoch_progress": {"a": 1}, "epoch_loop.batch_progress": {"a": 1}}},
    "optimizer_states": [{}], "lr_schedulers": [{}],
}  # fmt: skip
"""All that a resumed run needs."""


@pytest.mark.parametrize("part", WHOLE)
def test_a_run_does_not_go_on_without_a_part_of_its_state(part: str, tmp_path: Path) -> None:
    path, given = tmp_path / "last.ckpt", "model: {init_args: {ema: 0.9}}"
    torch.save({**WHOLE, "global_step": 1}, path)
    assert resumption(path, given)["step"] == 1
    others = {name: entry for name, entry in WHOLE.items() if name != part}
    for changed in (others, {**others, part: type(WHOLE[part])()}):
        torch.save(changed, path)
        name = {"callbacks": "RunCheckpoint", "loops": "epoch_progress"}.get(part, part)
        with pytest.raises(UserError, match=f"last.ckpt has no {name}.*, without which a run"):
            resumption(path, given)


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "- a list",
        "trainer: {max_epochs: [1]}",
        "model: {class_path: [1], init_args: 3}\nseed_everything: {a: b}",
        f"data: {{init_args: {{root: {'x' * 10**5}}}}}\nseed_everything: {'x' * 10**5}\n",
    ],
    ids=["torn", "list", "length", "kinds", "long"],
)
def test_whatever_a_checkpoint_says_it_was_told_is_a_sentence(config: str, tmp_path: Path) -> None:
    """With --config of one's own a stranger's is only compared with it."""
    torch.save({**WHOLE, "config": config, "global_step": 1}, tmp_path / "last.ckpt")
    given = {"seed_everything": 1, "trainer": {"max_epochs": 2}, "model": {"class_path": "a.A"},
             "data": {"init_args": {"root": "x"}}}  # fmt: skip
    with pytest.raises(UserError) as caught:
        resumption(tmp_path / "last.ckpt", yaml.safe_dump(given))
    assert len(str(caught.value)) < 1000
    del given["seed_everything"], given["trainer"], given["model"]
    if config.startswith("data:"):  # what may change is recorded, and not at any length
        told = resumption(tmp_path / "last.ckpt", yaml.safe_dump(given))
        assert len(json.dumps(told)) < 2000


def test_a_pipe_in_a_run_s_folder_is_not_waited_for(tmp_path: Path) -> None:
    for name in (".lock", "run.json", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(
        UserError, match=r"\.lock is a pipe, a device or a link, not a file: remove it"
    ):
        RunLock(tmp_path)
    began = {"commit": "a", "resumed": [{"step": 1, "commit": "a"}]}
    assert continued(tmp_path, {"commit": "a"}, {"step": 1}) == (began, 0)
    with pytest.raises(UserError, match=r"holds no run \(.*run.json is a pipe"):
        describe(tmp_path)
    append(tmp_path / "metrics.jsonl", b'{"step": 1, "loss": 2.0}')
    assert read_metrics(tmp_path / "metrics.jsonl") == {"loss": [(1, 2.0)]}


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{", '{"resumed": 3}', '{"scores": 1}', "[" * 10**5, "\xff"]
)
def test_a_run_json_that_is_not_ours_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text, encoding="latin-1")
    (tmp_path / "config.yaml").write_text("model: 3")
    began = {"commit": "a", "resumed": [{"step": 1, "commit": "a"}]}
    assert continued(tmp_path, {"commit": "a"}, {"step": 1}) == (began, 0)
    with pytest.raises(UserError, match="holds no run"):
        describe(tmp_path)


def test_lines_of_a_log_that_are_not_ours_are_passed_over(tmp_path: Path) -> None:
    lines = ["3", "[]", "{}", '{"step": "x"}', '{"step": 1, "loss": []}', '{"step": 2, "loss": 1}']
    text = "\n".join([*lines, "[" * 10**5, "\xff"])
    (tmp_path / "metrics.jsonl").write_text(text, encoding="latin-1")
    assert read_metrics(tmp_path / "metrics.jsonl") == {"loss": [(2, 1.0)]}


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot write"):
        RunLock(tmp_path)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").hardlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"\.lock is a pipe, a device or a link, not a file"):
        RunLock(tmp_path)
    assert (tmp_path / "precious").read_text() == "text"
