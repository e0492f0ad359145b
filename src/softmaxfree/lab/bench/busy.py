"""A training step on all cores, alone and beside another training process.

`python -m softmaxfree.lab.bench.busy COUNT` trains for COUNT steps in a process that has chosen how
its threads wait, as every command does, and prints the median seconds of a step.
"""

import os
import statistics
import subprocess
import sys
from time import perf_counter

from ...threads import SETTINGS
from .training import prepare_step

STEPS = 25
ROUNDS = 3
GNU_DEFAULT = {"GOMP_SPINCOUNT": "300000"}


def train(count: int) -> float:
    """Median seconds of a training step of softpp_nano on 64 images of 32 x 32."""
    step, seconds = prepare_step("softpp"), []
    for number in range(count + 3):
        if number == 3:
            print("training", flush=True)
        before = perf_counter()
        step()
        seconds.append(perf_counter() - before)
    return statistics.median(seconds[3:])


def measure() -> dict[str, float]:
    """Seconds of a step: alone, alone with GNU's default waiting, and beside another process.

    They take turns, each in its own process; the best of several rounds counts.
    """
    found: dict[str, list[float]] = {"alone": [], "alone, GNU's default": [], "beside": []}
    for _ in range(ROUNDS):
        found["alone"].append(_seconds(_started(STEPS)))
        found["alone, GNU's default"].append(_seconds(_started(STEPS, **GNU_DEFAULT)))
        with _started(10**9, OMP_NUM_THREADS="1") as other:
            assert other.stdout is not None
            other.stdout.readline()  # when it is training
            try:
                found["beside"].append(_seconds(_started(STEPS)))
            finally:
                other.kill()
    return {name: min(seconds) for name, seconds in found.items()}


def _started(count: int, **settings: str) -> subprocess.Popen[str]:
    """Trains in a process that chooses anew how its threads wait, unless settings say so."""
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    call = [sys.executable, "-m", __name__, str(count)]
    return subprocess.Popen(call, env=kept | settings, stdout=subprocess.PIPE, text=True)


def _seconds(process: subprocess.Popen[str]) -> float:
    return float(process.communicate()[0].split()[-1])


if __name__ == "__main__":
    print(train(int(sys.argv[1])))
