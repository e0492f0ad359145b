"""A training step on all cores, alone and beside another training process.

`python -m softmaxfree.lab.bench.busy COUNT` trains for COUNT steps in a process that has chosen how
its threads wait, as every command does, and prints the median seconds of a step.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep

import torch
import torch.nn.functional as F

from ...models.build import build_model
from ...threads import SETTINGS

STEPS = 25
ROUNDS = 3
GNU_DEFAULT = {"GOMP_SPINCOUNT": "300000"}


def train(count: int) -> float:
    """Median seconds of a training step of softpp_nano on 64 images of 32 x 32."""
    torch.manual_seed(0)
    model = build_model("softpp_nano", 10).train()
    optimizer = torch.optim.AdamW(model.parameters())
    images, targets = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    seconds = []
    for _ in range(count + 3):
        before = perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
        seconds.append(perf_counter() - before)
    return statistics.median(seconds[3:])


def measure() -> dict[str, float]:
    """Seconds of a step: alone, alone with GNU's default waiting, and beside another process.

    They take turns, each in its own process; the best of several rounds counts.
    """
    found: dict[str, list[float]] = {"alone": [], "alone, GNU's default": [], "beside": []}
    for _ in range(ROUNDS):
        found["alone"].append(_in_process())
        found["alone, GNU's default"].append(_in_process(**GNU_DEFAULT))
        with _another_training():
            found["beside"].append(_in_process())
    return {name: min(seconds) for name, seconds in found.items()}


def _command(count: int) -> list[str]:
    return [sys.executable, "-m", __name__, str(count)]


def _environment(**settings: str) -> dict[str, str]:
    """The environment without this process's choice of waiting, so that the other chooses anew."""
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return kept | settings


def _in_process(**settings: str) -> float:
    done = subprocess.run(
        _command(STEPS), env=_environment(**settings), capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@contextmanager
def _another_training() -> Iterator[None]:
    """Runs another process that trains on one thread."""
    process = subprocess.Popen(
        _command(10**9), env=_environment(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL
    )
    try:
        sleep(10)  # until it has imported torch
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    print(train(int(sys.argv[1])))
