"""A model that trains in seconds, and the command line around it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

SMALL: dict[str, Any] = {
    "seed_everything": 3,
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 2,
        "enable_progress_bar": False,
        "gradient_clip_val": 1.0,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    },
    "model": {
        "class_path": "softmaxfree.tasks.Classification",
        "init_args": {
            "backbone": "softpp_nano",
            "num_classes": 10,
            "options": {
                "embed_dims": [16, 16, 16, 16],
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 1, 1, 1],
            },
            "drop_path": 0.2,
            "mixup": 0.8,
            "cutmix": 1.0,
            "smoothing": 0.1,
            "ema": 0.99,
            "warmup_epochs": 1,
        },
    },
    "data": {
        "class_path": "softmaxfree.data.ImageData",
        "init_args": {
            "name": "digits",
            "size": 16,
            "batch_size": 128,
            "num_workers": 2,
            "auto_augment": "rand-m9-mstd0.5-inc1",
            "color_jitter": 0.4,
            "erase": 0.25,
        },
    },
}
"""Everything that is random is on."""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def environment(**more: str) -> dict[str, str]:
    """Without what Lightning leaves in this process's."""
    names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return {**inherited, "OMP_NUM_THREADS": "1", **more}


def softmaxfree(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "softmaxfree", *map(str, words)],
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def two_processes(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same as torchrun starts it twice."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m",
              "softmaxfree"]  # fmt: skip
    return subprocess.run(
        [sys.executable, *launch, *map(str, words), "--trainer.devices=2",
         "--trainer.strategy=ddp"],
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def scores_in(output: str) -> list[str]:
    """The lines of validation's scores."""
    return [line for line in output.splitlines() if line.startswith("val/")]


def held_out(output: str) -> str:
    """The score that a run ends with."""
    return next(line for line in output.splitlines() if line.startswith("held-out"))


def weights(path: Path, name: str = "current_model_state") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)[name]
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


Fit = Callable[..., Path]


@pytest.fixture
def fit(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """Trains in this process: arguments -> the folder of the run."""
    from softmaxfree.training.command import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOFTMAXFREE_RUN", raising=False)

    def train(*words: str, out: str = "run") -> Path:
        few = ("--data.num_workers=0", "--trainer.max_epochs=1", "--trainer.limit_train_batches=3")
        run("fit", ["--config", str(small), "--out", out, *few, *words])
        return tmp_path / out

    return train
