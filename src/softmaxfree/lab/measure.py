"""Time, interleaved between contestants, and memory, in a process of its own for each point."""

import math
import multiprocessing
import resource
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import sysconf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..environment import largest_ever, process_bytes
from ..errors import UserError


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    best: float
    median: float


def time_interleaved(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    seconds: float = 10.0,
    device: str = "cpu",
) -> dict[str, Timing]:
    """Times every contestant in turns, `repeats` of them, so that all meet the same machine.

    A turn is some calls to warm up and as many that are measured: five each, fewer for a slow
    contestant, and of one that takes over a second the first call is measured too. One that has
    used up its seconds has no further turns. On a GPU a call ends when all that it has started is
    done.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def timed(call: Callable[[], object]) -> float:
        before = perf_counter()
        call()
        wait()
        return perf_counter() - before

    measured: dict[str, list[float]] = {name: [] for name in contestants}
    spent = dict.fromkeys(contestants, 0.0)
    for _ in range(repeats):
        for name, call in contestants.items():
            if spent[name] > seconds:
                continue
            taken, calls = 0.0, 5
            while calls:
                last = timed(call)
                taken += last
                calls = min(calls - 1, int(0.05 / taken))
            if last > 1:
                measured[name].append(last)
                spent[name] += taken
                continue
            turn = 0.0
            for _ in range(5):
                measured[name].append(timed(call))
                turn += measured[name][-1]
                if taken + turn > 0.1:
                    break
            spent[name] += taken + turn
    return {name: Timing(min(times), statistics.median(times)) for name, times in measured.items()}


def square_product(
    size: int = 1024, device: str = "cpu", dtype: str = "float32"
) -> tuple[Callable[[], object], int]:
    """A large square matrix product, the machine's best rate, and its operations."""
    a, b = torch.randn(2, size, size).to(device, getattr(torch, dtype))
    return lambda: a @ b, 2 * size**3


def exponents(rows: list[dict[str, Any]], quantity: str) -> dict[str, float]:
    """How a quantity grows with n, by contestant, where there is more than one n of it."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.get(quantity):
            points.setdefault(row["contestant"], []).append((row["n"], row[quantity]))
    return {name: exponent(*zip(*found)) for name, found in points.items() if len(found) > 1}


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The p of values ~ sizes^p, by least squares on logarithms."""
    x = [math.log(size) for size in sizes]
    y = [math.log(value) for value in values]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
    return above / sum((a - mean_x) ** 2 for a in x)


def peak_memory(call: Callable[[], object], device: str = "cpu") -> int:
    """Bytes that the call takes at its peak beyond what is there before it.

    Of a GPU those that torch has given out; of a CPU resident memory.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - start
    before = process_bytes("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except OSError:  # not Linux, or not allowed: the largest since the process began has to do
        before = None
    start = largest_ever() if before is None else before
    call()
    end = largest_ever() if before is None else process_bytes("VmHWM")
    assert end is not None
    return max(end - start, 0)


def memory_limit() -> int:
    """Bytes that a measured process may take: half of the machine's."""
    return sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES") // 2


def in_fresh_process(
    function: Callable[..., Any], *arguments: Any, module: str | None = None
) -> Any:
    """What a function of a module returns in a process of its own; None if memory ran out.

    The process is forked from one that has imported a module, the function's own if none is given,
    and done nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module or function.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        answer, error = receiver.recv()
    except EOFError:  # killed by the system
        answer, error = None, None
    finally:
        process.join()
        receiver.close()
    if error is not None:
        raise RuntimeError(f"measuring {function.__name__}{arguments} failed: {error}")
    return answer


def _answer(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """In the process: sends the result, or None where memory has run out, or an error's text."""
    if sys.platform == "linux":
        limit = (process_bytes("VmData") or 0) + memory_limit()
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        sender.send((function(*arguments), None))
    except (MemoryError, torch.OutOfMemoryError):
        sender.send((None, None))
    except Exception as error:
        out_of_memory = "can't allocate memory" in str(error)
        sender.send((None, None if out_of_memory else repr(error)))


def check_machine(threads: int | None, device: str = "cpu") -> None:
    """Raises UserError for a number of threads or a device that this machine does not have."""
    if threads is not None and threads < 1:
        raise UserError(f"--threads must be at least 1, got {threads}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was given, but torch finds no GPU; use --device cpu")
