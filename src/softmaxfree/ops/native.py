"""Optional: parts of the attention in compiled code, for CPUs and float32.

`softmaxfree build` compiles `native.cpp`, one file without dependencies, in a few seconds and
puts it into the user's cache, where it is found from then on. Without it everything is computed
by torch, to the same numbers within rounding. SOFTMAXFREE_NATIVE=0 leaves it out.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError

SOURCE = Path(__file__).with_name("native.cpp")

_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-signed-zeros", "-fno-trapping-math",
    "-Wno-ignored-attributes", "-shared", "-fPIC",
)  # fmt: skip

_SIGNATURES = {
    "kernel_of_tokens": ("", "pllppplllllfi"),
    "most_landmarks": ("l", ""),
    "kernel_matrix": ("", "pplllfi"),
    "inverse": ("i", "ppllfi"),
    "gelu": ("", "pplii"),
    "gelu_backward": ("", "ppplii"),
    "kernel_gradient": ("i", "pllpllplllllli"),
}
"""Result and arguments of each function: pointers, longs, floats, ints."""

_TYPES = {
    "": None,
    "p": ctypes.c_void_p,
    "l": ctypes.c_long,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
}


def path() -> Path:
    """Where the library is, or would be: its name tells its source and this machine's CPU."""
    cpu = Path("/proc/cpuinfo")
    machine = platform.platform(terse=True) + platform.machine()
    if cpu.exists():
        lines = cpu.read_text().split("\n\n")[0].splitlines()
        machine += "".join(line for line in lines if line.startswith(("model name", "flags")))
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join((*_FLAGS, machine)).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "softmaxfree" / f"native-{key[:16]}.so"


def build() -> Path:
    """Compiles the library for this machine and puts it where it is found; returns the place."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UserError(
            "no C++ compiler found: install g++ (12 or later) or clang++ (15), or set CXX; "
            "without it everything works as before, computed by torch"
        )
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "native.so"
        for threads in (["-fopenmp"], []):  # Apple's compiler has none
            call = [compiler, *_FLAGS, *threads, str(SOURCE), "-o", str(made)]
            done = subprocess.run(call, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        else:
            raise UserError(f"{compiler} could not compile {SOURCE.name}: {done.stderr[:500]}")
        made.replace(target)
    library.cache_clear()
    return target


@lru_cache(maxsize=1)
def library() -> Any:
    """The compiled functions; None where they are not built, or left out."""
    if os.environ.get("SOFTMAXFREE_NATIVE") == "0" or not path().exists():
        return None
    found = ctypes.CDLL(str(path()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, f"softmaxfree_{name}")
        function.restype = _TYPES[result]
        function.argtypes = [_TYPES[letter] for letter in arguments]
    return found


_left_out = ContextVar("_left_out", default=False)


@contextmanager
def left_out() -> Iterator[None]:
    """Everything inside is computed by torch."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def takes(*tensors: Tensor) -> bool:
    """Whether compiled code may compute with these: real float32 tensors that nobody traces."""
    return (
        not torch.compiler.is_compiling()
        and library() is not None
        and not _left_out.get()
        and not torch._C._len_torch_dispatch_stack()  # such as FlopCounterMode
        and all(
            x.device.type == "cpu"
            and x.dtype == torch.float32
            and type(x) in (Tensor, nn.Parameter)
            and x.stride(-1) == 1
            for x in tensors
        )
    )


def takes_landmarks(landmarks: Tensor) -> bool:
    """The same for (..., m, ...) landmarks, of which there may not be too many."""
    return takes(landmarks) and landmarks.shape[-2] <= library().softmaxfree_most_landmarks()


def kernel_of_tokens(
    tokens: Tensor, centre: Tensor, columns: Tensor, out: Tensor, bound: float
) -> None:
    """2^(-|x - y|^2 / 2) of x = tokens - centre, within the bound, and landmarks y.

    Args:
        tokens: (b, n, d).
        centre: (b, 1, d).
        columns: (b, m, d + 2), [y, -|y|^2 / 2, -1 / 2], all of them times a square of a scale.
        out: (b, m, n), rows without gaps between them.
        bound: Of the tokens.
    """
    (b, n, d), m = tokens.shape, columns.shape[1]
    library().softmaxfree_kernel_of_tokens(
        tokens.data_ptr(), tokens.stride(0), tokens.stride(1), centre.data_ptr(),
        columns.data_ptr(), out.data_ptr(), out.stride(0), b, n, m, d, bound,
        torch.get_num_threads(),
    )  # fmt: skip


def kernel_matrix(landmarks: Tensor, scale: float) -> Tensor:
    """2^(-|scale (x - y)|^2 / 2) of landmarks (..., m, d): (..., m, m), symmetric, diagonal 1."""
    *leading, m, d = landmarks.shape
    landmarks = landmarks.contiguous()
    out = landmarks.new_empty(*leading, m, m)
    count = out.numel() // (m * m)
    library().softmaxfree_kernel_matrix(
        landmarks.data_ptr(), out.data_ptr(), count, m, d, scale, torch.get_num_threads()
    )
    return out


def inverse(a: Tensor, ridge: float) -> Tensor | None:
    """Of positive definite matrices A + ridge I, (..., m, m); None if one of them is not."""
    a = a.contiguous()
    out = torch.empty_like(a)
    m = a.shape[-1]
    failed = library().softmaxfree_inverse(
        a.data_ptr(), out.data_ptr(), a.numel() // (m * m), m, ridge, torch.get_num_threads()
    )
    return None if failed else out


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """Of a tensor without gaps, in its exact or its tanh form."""
    out = torch.empty_like(x)
    library().softmaxfree_gelu(
        x.data_ptr(), out.data_ptr(), x.numel(), tanh, torch.get_num_threads()
    )
    return out


def gelu_backward(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    """The gradient of x, of that of the result, which is written over."""
    library().softmaxfree_gelu_backward(
        grad.data_ptr(), x.data_ptr(), grad.data_ptr(), x.numel(), tanh, torch.get_num_threads()
    )
    return grad


def kernel_gradient(v: Tensor, grad: Tensor, weight: Tensor) -> Tensor | None:
    """Of a convolution in which the channels of a head share a kernel; None without code for it.

    Args:
        v: (b, h, w, dim) values.
        grad: (b, h, w, dim), the gradient of the result.
        weight: (heads, 1, k, k).

    Returns:
        The gradient of the weight.
    """
    v, grad = v.contiguous(), grad.contiguous()
    (b, height, width, dim), heads = v.shape, len(weight)
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    done = library().softmaxfree_kernel_gradient(
        v.data_ptr(), v.stride(0), dim, grad.data_ptr(), grad.stride(0), dim, out.data_ptr(),
        b, height, width, heads, dim // heads, weight.shape[-1], torch.get_num_threads(),
    )  # fmt: skip
    return out if done else None
