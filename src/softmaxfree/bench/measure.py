"""Time, interleaved between contestants, and memory, in a process of its own for each point."""

import json
import math
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    best: float
    median: float


def time_interleaved(
    contestants: dict[str, Callable[[], object]], repeats: int, seconds: float = 10.0
) -> dict[str, Timing]:
    """Times every contestant in turns, `repeats` of them, so that all meet the same machine.

    A turn is some calls to warm up and as many that are measured: five each, fewer for a slow
    contestant. One that has used up its seconds has no further turns.
    """
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    spent = dict.fromkeys(contestants, 0.0)
    for _ in range(repeats):
        for name, call in contestants.items():
            if spent[name] > seconds:
                continue
            start = perf_counter()
            calls = 5
            while calls and not (measured[name] and measured[name][-1] > 1.0):
                call()
                calls = min(calls - 1, int(0.05 / (perf_counter() - start)))
            for _ in range(5):
                before = perf_counter()
                call()
                after = perf_counter()
                measured[name].append(after - before)
                if after - start > 0.1:
                    break
            spent[name] += after - start
    return {name: Timing(min(times), statistics.median(times)) for name, times in measured.items()}


def square_product(size: int = 1024) -> tuple[Callable[[], object], int]:
    """A large square float32 matrix product, the machine's best rate, and its operations."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: a @ b, 2 * size**3


def exponent(sizes: list[int], values: list[float]) -> float:
    """The p of values ~ sizes^p, by least squares on logarithms."""
    x = [math.log(size) for size in sizes]
    y = [math.log(value) for value in values]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
    return above / sum((a - mean_x) ** 2 for a in x)


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes of resident memory that the call takes at its peak beyond what is there before it."""
    before = _status("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except OSError:  # not Linux, or not allowed: the largest since the process began has to do
        before = None
    start = _largest_ever() if before is None else before
    call()
    end = _largest_ever() if before is None else _status("VmHWM")
    assert end is not None
    return max(end - start, 0)


def _status(field: str) -> int | None:
    """A number of bytes that Linux reports of this process; None on other systems."""
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def largest_memory() -> int:
    """The most bytes that this process has ever had in memory, all included."""
    # What getrusage says counts the process that this one was started from.
    return _status("VmHWM") or _largest_ever()


def _largest_ever() -> int:
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def in_fresh_process(module: str, **arguments: Any) -> Any:
    """What `python -m module` prints as JSON for these arguments; None if it ran out of memory."""
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(arguments)], capture_output=True, text=True
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode < 0 or "can't allocate memory" in done.stderr:
        return None
    raise RuntimeError(f"measuring {arguments} failed:\n{done.stderr}")
