"""Time, of contestants that take turns, and memory, of each call in a fresh process."""

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
from torch import Tensor

from ..environment import chosen_device, largest_ever, process_bytes
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
    """Times contestants in turns, `repeats` rounds of them, so that all meet the same machine.

    A turn is up to five calls to warm up and up to five that are measured. A slow contestant has
    fewer, and a call of more than a second is measured without warm-up. A contestant that has used
    up its seconds gets no further turn. On a GPU a call ends when all its kernels have finished.
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


def noise(*shape: int) -> Tensor:
    """The same for every contestant, and in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The p of values ~ sizes^p, by least squares on logarithms."""
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, values)]).slope


def peak_memory(call: Callable[[], object], device: str = "cpu") -> int:
    """Peak memory of a call in bytes, beyond what the process already has.

    On a GPU this is the memory that torch allocated, on a CPU resident memory.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - start
    before = process_bytes("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:  # not Linux, or not allowed: use the largest since the process began
        before = None
    start = largest_ever() if before is None else before
    call()
    end = largest_ever() if before is None else process_bytes("VmHWM")
    assert end is not None
    return max(end - start, 0)


def memory_limit() -> int:
    """Bytes that a measured process may take: half of the machine's memory."""
    return sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES") // 2


def in_fresh_process(
    function: Callable[..., Any], *arguments: Any, module: str | None = None
) -> Any:
    """Calls a function in a fresh process and returns its result; None if memory ran out.

    The process is forked from one that has only imported `module`, by default the function's own.
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
    """Runs in the fresh process: sends the result, None if memory ran out, or an error's text."""
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
    chosen_device(device)
