"""`softmaxfree bench memory`: the paper's figure of memory against the number of tokens."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

from tqdm import tqdm

from ...environment import command_line
from ...imports import Names
from ..results import Note, Page, publish, result
from .attention import too_large
from .contestants import Case, Device, Dtype, Setting, find, prepare, verified
from .runner import Entry, Plan, Row, exponents, measure_in_turns, notes, over_n, start

CASES = [Case(1, 12, 784 * p, layers=12) for p in range(1, 9)]
"""12 layers, d = 384, 12 heads, m = 49, batch 1."""


def bench_memory(
    threads: int = 1,
    out: Path = Path("results"),
    contestants: list[str] | None = None,
    modules: Names = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    against: Path | None = None,
) -> Row:
    """Measure the memory of 12 layers in training from 784 to 6,272 tokens: the paper's figure.

    All attentions and the packages', each point in a fresh process (8 minutes). Prints a table
    with the fitted exponents and writes it as JSON, CSV, Markdown and the figure.

    Args:
        threads: Threads to compute with; ratios are most reliable with 1.
        out: Folder for the results.
        contestants: Names of attentions, such as [softpp,performer]; all if not given.
        modules: Python modules to import first, which register attentions of your own.
        device: Device to compute on.
        dtype: Type of tokens and weights.
        against: A .json file of an earlier run to compare with.
    """
    from ..pictures import draw_memory  # needs matplotlib: fails before the work, not after

    earlier = start(threads, device, modules, against)
    names, setting = verified(contestants), Setting(device, dtype)
    plan = Plan(repeats=0, memory="call", device=device, modules=modules)
    rows: list[Row] = []
    work = [(name, case) for name in names for case in CASES]
    for name, case in tqdm(work, desc="bench memory", unit="point", leave=False):
        rows.append({**asdict(case), "contestant": name})
        ready = partial(prepare, name, case, "training", setting)
        entry = Entry(rows[-1], ready, obstacle=too_large(name, case, "training"))
        measure_in_turns([entry], "training", plan, "training_note")
    titles = {name: find(name).title for name in names}
    content = result(command_line(), rows, **asdict(setting), titles=titles)
    content["exponents"] = exponents(rows, "training_bytes")
    return publish(out / "memory", content, page, draw_memory, earlier, ["contestant", "n"])


def page(content: Row) -> Page:
    why = notes(content, "training_note")
    note = f"""\
The peak of a forward pass through 12 layers with residual connections, batch 1, and of the
backward pass through the last of them, when everything kept is still there; beyond the weights
and the input. {content["dtype"]} on {content["device"]}; each point in a fresh process, which may
take half of the machine's memory. Kernels and softmax matrices that a method forms count; fused
softmax forms none."""
    return Page(
        "Memory: 12 attention layers in training, d = 384, 12 heads, m = 49, n = 784 p",
        [
            over_n(content, "MB at n =", "training_bytes", 1e6),
            *(["\n".join(why)] if why else []),
            Note(note),
        ],
    )
