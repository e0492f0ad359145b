"""How OpenMP's threads wait for each other: spinning on their core, or asleep.

Spinning threads answer at once, but on a core that another program uses too they spin for whole
time slices at every barrier: a training step takes up to thirty times as long. Sleeping threads
leave the core to others, but on an idle machine waking them can double the time of a small
model's step. So commands let threads sleep at once if other programs keep a core busy when they
start, and spin only briefly if not. `docs/performance.md` has the measurements.
"""

import os
import sys
import time
from pathlib import Path

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables by which users set how threads wait, in GNU's and LLVM's runtimes."""
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
BRIEF = {"GOMP_SPINCOUNT": "30000"}
"""About 1 ms of spinning, where GNU's default of 300,000 is about 10 ms."""


def started_as_command() -> bool:
    """Whether this process is `softmaxfree ...` or `python -m softmaxfree ...`."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # Python imports the package before it has found the module's file
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
        return module.split(".")[0] == "softmaxfree"
    return Path(program).stem in ("softmaxfree", "softmaxfree-script")


def choose_waiting() -> None:
    """Sets how threads of this process and its children wait, unless the user has set it.

    OpenMP's runtime reads the environment once, when torch loads it: call this before. Does
    nothing where Linux's counters of busy cores are missing.
    """
    if any(name in os.environ for name in SETTINGS):
        return
    busy = busy_cores()
    if busy is not None:
        os.environ.update(PASSIVE if busy > 0.5 else BRIEF)


def busy_cores(seconds: float = 0.1) -> float | None:
    """The number of cores that other processes keep busy; None if the system does not tell."""
    before = _core_times()
    time.sleep(seconds)
    after = _core_times()
    if before is None or after is None:
        return None
    total, idle = (now - then for now, then in zip(after, before))
    return (1 - idle / total) * (os.cpu_count() or 1) if total else 0.0


def _core_times() -> tuple[int, int] | None:
    """Ticks of all cores since the system started: in total, and idle."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    ticks = [int(word) for word in words[1:9]]  # user nice system idle iowait irq softirq steal
    return sum(ticks), ticks[3] + ticks[4]


def waiting() -> str:
    """The settings of how threads wait, as text."""
    found = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return ", ".join(found) or "nothing set: threads spin for milliseconds while they wait"
