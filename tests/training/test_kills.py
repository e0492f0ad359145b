"""Nothing is lost: real processes, really killed."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from softmaxfree import cli
from softmaxfree.checkpoint_files import LAST
from softmaxfree.files import remove_unfinished

from ..data.folders import write_digits
from .conftest import SMALL, environment, equal, held_out, softmaxfree, weights
from .schedules import differences


def wait_for(condition: str, path: Path, process: "subprocess.Popen[str]") -> None:
    """Until a file has some text in it."""
    for _ in range(6000):
        if path.exists() and condition in path.read_text():
            return
        if process.poll() is not None:
            raise AssertionError(f"ended before {condition}: {process.communicate()[0]}")
        time.sleep(0.02)
    raise AssertionError(f"{condition} never came")


def interrupted(words: list[str | Path], cwd: Path, step: int, number: int) -> tuple[int, str]:
    """Runs until a step is logged, sends the signal, gives exit code and output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "softmaxfree", *map(str, words)],
        cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    wait_for(f'"step": {step},', cwd / "cut" / "metrics.jsonl", process)
    if number == signal.SIGKILL:
        process.send_signal(number)
    else:  # a scheduler signals loader workers too
        os.killpg(process.pid, number)
    output = process.communicate(timeout=120)[0]
    return process.returncode, output


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_one_never_stopped(
    small: Path, tmp_path: Path
) -> None:
    """Augmentation, mixup, drop-path, averages and workers are on; 11 steps an epoch."""
    write_digits(tmp_path / "digits", train=88, val=16)
    command: list[str | Path] = [
        "fit", "--config", small, "--save_every", "3", "--data.name=", "--data.root=digits",
        "--data.batch_size=8",
    ]  # fmt: skip
    whole = softmaxfree(*command, "--out", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    cut = [*command, "--out", "cut", "--checkpoint", "last"]

    code, _ = interrupted(cut, tmp_path, 7, signal.SIGKILL)  # in the first epoch
    assert code == -signal.SIGKILL
    assert torch.load(tmp_path / "cut/last.ckpt", weights_only=True)["global_step"] in (6, 9)

    code, output = interrupted(cut, tmp_path, 13, signal.SIGTERM)  # in the second
    assert code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step" in output
    stopped = torch.load(tmp_path / "cut/last.ckpt", weights_only=True)["global_step"]
    assert f"after step {stopped};" in output
    assert stopped >= 14

    code, output = interrupted(cut, tmp_path, stopped, signal.SIGUSR1)
    assert code == 128 + signal.SIGUSR1
    assert "stopped by SIGUSR1" in output

    done = softmaxfree(*cut, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("state_dict", "current_model_state"):
        assert equal(
            weights(tmp_path / "whole/last.ckpt", name), weights(tmp_path / "cut/last.ckpt", name)
        )
    assert held_out(done.stdout) == held_out(whole.stdout)
    ends = [torch.load(tmp_path / run / "last.ckpt", weights_only=True) for run in ("whole", "cut")]
    assert ends[0]["lr_schedulers"] == ends[1]["lr_schedulers"]
    assert ends[0]["global_step"] == ends[1]["global_step"] == 22
    first, second = (end["optimizer_states"][0]["state"] for end in ends)
    assert all(torch.equal(first[i][name], second[i][name]) for i in first for name in first[i])


PLANS = {
    "an epoch": [],  # of 7 steps, each of 8 images; a checkpoint at the end of each
    "3 steps": ["--save_every=3", "--data.num_workers=2", "--trainer.check_val_every_n_epoch=2"],
    "5 steps": ["--save_every=5", "--trainer.max_steps=17", "--trainer.val_check_interval=4"],
}
"""What is saved when."""
SCHEDULES = [
    ("an epoch", (3,)), ("an epoch", (7,)), ("an epoch", (14,)), ("an epoch", (3, 14)),
    ("an epoch", (9, 14)), ("an epoch", (7, 9)), ("an epoch", (7, 14)), ("an epoch", (14, 21)),
    ("an epoch", (7, 21)), ("an epoch", (7, 14, 21)),
    ("3 steps", (7,)), ("3 steps", (14, 15)), ("3 steps", (5, 21)), ("3 steps", (3, 7, 14)),
    ("3 steps", (20, 21)),
    ("5 steps", (4,)), ("5 steps", (8, 10)), ("5 steps", (7, 15)), ("5 steps", (17,)),
    ("5 steps", (5, 7, 17)),
]  # fmt: skip
"""Steps at which a run is killed; twenty of them."""


def command(small: Path, images: Path, plan: str, out: str) -> list[str | Path]:
    return [
        "fit", "--config", small, "--trainer.max_epochs=4", "--data.name=", f"--data.root={images}",
        "--data.batch_size=8", "--data.eval_sizes=[16]", "--data.num_workers=0", *PLANS[plan],
        "--checkpoint=last", f"--out={out}",
    ]  # fmt: skip


def left(folder: Path) -> dict[str, Any]:
    """All that a run is judged by."""
    found = {name: torch.load(folder / name, weights_only=True) for name in (LAST, "best.ckpt")}
    return {**found, "scores": json.loads((folder / "run.json").read_text())["scores"]}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), train=56, val=16)


@pytest.fixture(scope="module")
def never_killed(
    tmp_path_factory: pytest.TempPathFactory, images: Path
) -> Callable[[str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))

    @cache
    def train(plan: str) -> dict[str, Any]:
        done = softmaxfree(*command(folder / "small.yaml", images, plan, plan), cwd=folder)
        assert done.returncode == 0, done.stderr
        return left(folder / plan)

    return train


def forked(words: list[str | Path], cwd: Path) -> int:
    """Starts a command in a process forked from this one, which has imported all; its number."""
    if number := os.fork():
        return number
    status = 1
    try:
        os.chdir(cwd)
        os.environ.update(environment())
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        with (cwd / "output.txt").open("a") as sys.stdout:
            sys.stderr = sys.stdout
            cli.main([*map(str, words)])
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:
        os._exit(status)


def kill_at(step: int, words: list[str | Path], cwd: Path) -> None:
    """Kills a run when it has logged a step or, if that is of a checkpoint, has written it."""
    process = forked(words, cwd)
    last, metrics = cwd / "cut" / LAST, cwd / "cut" / "metrics.jsonl"
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        saved = last.exists() and torch.load(last, weights_only=True)["global_step"]
        if saved == step or (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    # 0 where the run was quicker than we look
    assert os.waitstatus_to_exitcode(ended[1]) in (0, -signal.SIGKILL), output(cwd)


def output(cwd: Path) -> str:
    return (cwd / "output.txt").read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "steps"), SCHEDULES, ids=str)
def test_the_table_of_kills(
    plan: str,
    steps: tuple[int, ...],
    small: Path,
    images: Path,
    tmp_path: Path,
    never_killed: Callable[[str], dict[str, Any]],
) -> None:
    words = command(small, images, plan, "cut")
    for step in steps:
        kill_at(step, words, tmp_path)
    status = os.waitstatus_to_exitcode(os.waitpid(forked(words, tmp_path), 0)[1])
    assert status == 0, output(tmp_path)
    assert differences(never_killed(plan), left(tmp_path / "cut")) == []


WRITER = """
import sys, torch
from pathlib import Path
from softmaxfree.training.checkpoint import AtomicCheckpointIO
writer = AtomicCheckpointIO()
for step in range(10_000):
    checkpoint = {"step": step, "weights": torch.full((2**22,), float(step))}
    writer.save_checkpoint(checkpoint, sys.argv[1])
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    while int(process.stdout.readline()) < 1:
        pass
    while not any(path.stat().st_size > 2**20 for path in _unfinished(target)):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert _unfinished(target), "the kill came between two writes"
    found = torch.load(target, weights_only=True)
    assert torch.equal(found["weights"], torch.full((2**22,), float(found["step"])))
    remove_unfinished(target)
    assert list(tmp_path.iterdir()) == [target]


def _unfinished(target: Path) -> list[Path]:
    return [path for path in target.parent.glob(".last.ckpt.*") if path.exists()]
