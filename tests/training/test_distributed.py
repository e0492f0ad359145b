"""Two real processes under torchrun, against one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from softmaxfree.tasks import Classification
from softmaxfree.training.command import run
from softmaxfree.training.plugins import SynchronisedBatchNorm

from ..data.folders import write_digits
from ..tasks.test_task import NANO
from .conftest import SMALL, Fit, environment, equal, weights
from .test_kills import wait_for

pytestmark = pytest.mark.slow

PLAIN = {
    "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "lr": 0.05, "warmup_epochs": 0,
    "drop_path": 0.0, "mixup": 0.0, "cutmix": 0.0, "freeze": ["*.bn"], "ema": 0.9,
}  # fmt: skip
"""Nothing that looks at a batch as a whole."""


def configuration(folder: Path, processes: int) -> Path:
    config = {
        "seed_everything": 3,
        "trainer": SMALL["trainer"]
        | {"max_epochs": 2, "limit_val_batches": 1.0}
        | ({"devices": processes, "strategy": "ddp"} if processes > 1 else {}),
        "model": {
            "class_path": SMALL["model"]["class_path"],
            "init_args": SMALL["model"]["init_args"] | PLAIN,
        },
        "data": {
            "class_path": SMALL["data"]["class_path"],
            "init_args": SMALL["data"]["init_args"]
            | {"name": "", "root": str(folder / "numbers"), "val_split": "val", "batch_size": 20},
        },
    }
    path = folder / f"{processes}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(folder: Path, processes: int, out: str, restarts: int = 0) -> "subprocess.Popen[str]":
    launch = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}",
         f"--max-restarts={restarts}", "-m"]
        if processes > 1 else ["-m"]
    )  # fmt: skip
    words = ["fit", "--config", str(configuration(folder, processes)), "--out", out]
    return subprocess.Popen(
        [sys.executable, *launch, "softmaxfree", *words, "--save_every=3"],
        cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> str:
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` and `two`: 20 steps by one process and by two; 23 images to score, an odd number."""
    folder = tmp_path_factory.mktemp("runs")
    write_digits(folder / "numbers", train=200, val=23)
    for processes, out in ((1, "one"), (2, "two")):
        finish(start(folder, processes, out))
    return folder


def test_two_processes_follow_one(runs: Path) -> None:
    one, two = (torch.load(runs / out / "last.ckpt", weights_only=True) for out in ("one", "two"))
    assert one["global_step"] == two["global_step"] == 20
    for name in ("state_dict", "current_model_state"):
        for key, tensor in one[name].items():
            assert (tensor - two[name][key]).abs().max() <= 1e-5, key
    assert not equal(one["state_dict"], one["current_model_state"])


def test_scores_of_two_processes_are_those_of_one(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    told = json.loads((runs / "two" / "run.json").read_text())["scores"]["accuracy"]
    run("validate", ["--checkpoint", "two/last.ckpt", "--trainer.devices=1",
                     "--trainer.strategy=auto", "--data.eval_sizes=[16,24,32]",
                     f"--data.root={runs / 'numbers'}"])  # fmt: skip
    printed = capsys.readouterr().out
    for size, accuracy in told.items():
        name = "val/accuracy" if size == "16" else f"val/accuracy@{size}"
        assert f"{name:24}{accuracy * 100:.2f} %" in printed
    count = len(list((runs / "numbers" / "val").rglob("*.png")))
    assert count % 2
    assert told["16"] * count == pytest.approx(round(told["16"] * count), abs=1e-4)


def test_a_lost_worker_makes_all_start_again_from_the_last_checkpoint(runs: Path) -> None:
    process = start(runs, 2, "lost", restarts=1)
    wait_for('"step": 12,', runs / "lost" / "metrics.jsonl", process)
    victim = workers_of(process.pid)[-1]
    os.kill(victim, signal.SIGKILL)
    finish(process)
    for name in ("state_dict", "current_model_state"):
        assert equal(weights(runs / "two/last.ckpt", name), weights(runs / "lost/last.ckpt", name))


def workers_of(launcher: int) -> list[int]:
    """The training processes that torchrun started, in order of their rank."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == launcher:
            ranks = [word for word in variables if word.startswith(b"RANK=")]
            found |= {int(word.partition(b"=")[2]): int(entry.name) for word in ranks}
    return [found[rank] for rank in sorted(found)]


def test_batch_normalisation_is_synchronised_when_asked() -> None:
    """torch synchronises on GPUs only; here: every layer would be, and computes what it did."""
    task = Classification(**NANO).eval()
    images = torch.randn(2, 3, 32, 32)
    before, count = task(images), sum(isinstance(m, nn.BatchNorm2d) for m in task.modules())
    converted = SynchronisedBatchNorm().apply(task)
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in converted.modules()) == count > 0
    assert torch.equal(converted(images), before)


def test_the_option_chooses_it(fit: Fit) -> None:
    try:
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU"):
            fit("--trainer.sync_batchnorm=true", "--trainer.strategy=ddp", "--trainer.devices=1")
    finally:
        torch.distributed.destroy_process_group()
