"""`softmaxfree doctor`: whether this machine computes right, and what it does best."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor
from tqdm import tqdm

from ...environment import hardware, versions
from ...errors import UserError
from ...files import write_atomically
from ...ops import softmax_free_attention
from ...ops.backends import native, torch_only
from ...ops.inverse import INVERSES
from ...threads import waiting
from ..measure import noise, time_interleaved
from ..results import table
from .models import infer

MODEL, IMAGES = "softpp_tiny", (4, 3, 224, 224)
TOLERANCE = 1e-4
"""The largest relative error of float32 results that passes."""

Found = dict[str, float]


def doctor(out: Path | None = None) -> None:
    """Check whether this machine computes right, and say what it does best (half a minute).

    Versions and devices, a self-test against float64, the fastest inverse, number of threads,
    memory format and precision; and the lines to put into a shell and a config. Ends with an
    error if the self-test fails.

    Args:
        out: Folder for doctor.json; printed only if not given.
    """
    found: dict[str, Any] = {"hardware": hardware(), "versions": versions()}
    found["load"] = os.getloadavg()[0] / (os.cpu_count() or 1)
    found["native"] = str(native.path()) if native.library() else None
    found["waiting"] = waiting()
    found["errors"] = self_test()
    for name, (_, part) in tqdm(MEASURED.items(), desc="doctor", unit="part", leave=False):
        found[name] = part()
    print(report(found))
    if out is not None:
        path = out / "doctor.json"
        write_atomically(path, json.dumps(found, indent=1) + "\n")
        print(f"\nwritten: {path}")
    if not all(error <= TOLERANCE for error in found["errors"].values()):
        raise UserError("the self-test failed: do not trust results on this machine")


def devices() -> list[str]:
    """Devices that torch finds here."""
    found = ["cpu"]
    found += ["cuda"] if torch.cuda.is_available() else []
    found += ["mps"] if torch.backends.mps.is_available() else []
    return found


def self_test() -> Found:
    """Relative errors of result and gradients in float32 on every device, against float64."""
    inputs = noise(2, 849, 32).split((400, 400, 49), 1)

    def gradients(device: str, dtype: torch.dtype) -> list[Tensor]:
        q, v, landmarks = (x.to(device, dtype).requires_grad_() for x in inputs)
        out = softmax_free_attention(q, q, v, landmarks)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, v, landmarks))]

    with torch_only():
        expected = gradients("cpu", torch.float64)
    ways: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
        f"{device}, torch": (device, torch_only) for device in devices()
    }
    if native.library():
        ways["cpu, compiled"] = ("cpu", nullcontext)
    errors = {}
    for name, (device, context) in ways.items():
        with context():
            got = gradients(device, torch.float32)
        pairs = [(x.double().cpu(), y) for x, y in zip(got, expected)]
        errors[name] = max(((x - y).norm() / y.norm()).item() for x, y in pairs)
    return errors


def measure_inverses() -> Found:
    """Seconds of 64 landmark matrices of 49 x 49, by device and method."""
    x = noise(64, 49, 32)
    a = torch.exp(-(torch.cdist(x, x) ** 2) / 12)
    found: Found = {}
    for device in devices():
        calls = {
            f"{device}, {method}": partial(INVERSES[method], a.to(device), 20, 0.01)
            for method in ("cholesky", "rescaled")  # the two that compute the same
            if not (device == "mps" and method == "cholesky")
        }
        found |= _best(calls, device)
    return found


def measure_threads() -> Found:
    """Seconds of a batch in inference by the number of threads: 1, 2, 4 ... and all cores."""
    before, cores = torch.get_num_threads(), os.cpu_count() or 1
    counts = sorted({min(2**i, cores) for i in range(cores.bit_length() + 1)})
    model, images = _model(), noise(*IMAGES)

    def with_threads(count: int) -> None:
        torch.set_num_threads(count)
        infer(model, images)

    try:
        return _best({str(count): partial(with_threads, count) for count in counts})
    finally:
        torch.set_num_threads(before)


def measure_formats() -> Found:
    """Seconds of the first patch embedding by memory format."""
    embed, images = _model().stages[0].embed, noise(*IMAGES)
    formats = {"channels-last": torch.channels_last, "default": torch.contiguous_format}
    calls = {
        name: partial(infer, embed, images.contiguous(memory_format=order))
        for name, order in formats.items()
    }
    return _best(calls)


def measure_precisions() -> Found:
    """Seconds of a batch in inference on the best device, in float32 and in mixed precision."""
    device = devices()[-1]
    model, images = _model().to(device), noise(*IMAGES).to(device)

    def mixed() -> None:
        with torch.autocast(device, torch.bfloat16):
            infer(model, images)

    return _best({"32-true": partial(infer, model, images), "bf16-mixed": mixed}, device)


def _model() -> Any:
    torch.manual_seed(0)
    return timm.create_model(MODEL).eval()


def _best(calls: Mapping[str, Callable[[], object]], device: str = "cpu") -> Found:
    timings = time_interleaved(calls, repeats=3, seconds=3.0, device=device)
    return {name: timing.best for name, timing in timings.items()}


MEASURED: dict[str, tuple[str, Callable[[], Found]]] = {
    "inverse_s": ("64 inverses of 49 x 49", measure_inverses),
    "threads_s": (f"{MODEL}, 4 images of 224, by threads", measure_threads),
    "format_s": ("its first patch embedding, by memory format", measure_formats),
    "precision_s": (f"{MODEL}, 4 images of 224, by precision", measure_precisions),
}
"""What is compared: the title of its table, and how it is measured."""


def report(found: dict[str, Any]) -> str:
    machine, library = found["hardware"], found["native"]
    missing = "not built; `softmaxfree build` makes it, if there is a C++ compiler"
    checks = [
        [name, f"{error:.1e}", "right" if error <= TOLERANCE else "WRONG"]
        for name, error in found["errors"].items()
    ]
    lines = [
        ", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        f"{machine['cpu']}, {machine['cores']} cores, {machine['capability']}; "
        + machine.get("gpu", "no GPU"),
        f"compiled code: {library or missing}",
        f"waiting threads: {found['waiting']}",
        "",
        table(["self-test, float32 against float64", "error", ""], checks),
        "",
    ]
    for key, (title, _) in MEASURED.items():
        best = min(found[key].values())
        rows = [
            [name, f"{seconds * 1e3:.1f}", "best" if seconds == best else f"x {seconds / best:.2f}"]
            for name, seconds in found[key].items()
        ]
        lines += [table([title, "ms", ""], rows), ""]
    if found["load"] > 0.3:
        lines += ["Other programs keep this machine busy: do not trust the times.", ""]
    return "\n".join([*lines, "For this machine:", "", advice(found)])


def advice(found: dict[str, Any]) -> str:
    """Lines for a shell, and for a file that `softmaxfree fit --config` takes."""

    def best(key: str) -> str:
        return min(found[key], key=found[key].__getitem__)

    device, method = best("inverse_s").split(", ")
    own = "cholesky" if device == "cpu" else "rescaled"  # what auto chooses there
    build = "" if found["native"] else "    softmaxfree build\n"
    return f"""\
{build}    export OMP_NUM_THREADS={best("threads_s")}
    export OMP_WAIT_POLICY=passive  # for programs of your own beside other busy ones;
                                    # commands of softmaxfree choose by themselves

    trainer:
      accelerator: {"gpu" if "gpu" in found["hardware"] else "cpu"}
      precision: {best("precision_s")}
    model:
      class_path: softmaxfree.tasks.Classification
      init_args:
        options: {{inverse: {"auto" if method == own else method}}}"""
