"""The optional backend of compiled code, for CPUs and float32.

`softmaxfree build` compiles `native.cpp`, one file without dependencies, in a few seconds and
puts it into the user's cache, where it is found from then on. Without it torch computes
everything, to the same numbers within rounding. SOFTMAXFREE_NATIVE=0 leaves it out.

The functions are called through ctypes and are not `torch.library.custom_op`s: they write into
parts of existing memory, are built without torch's headers, and are never traced; and a call
through the dispatcher takes 8 us in place of 0.5.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import UserError
from ..batching import is_wrapped
from ..distances import TO_BASE_2, token_bound
from ..matrices import Ridge
from .torch import Torch

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
"""Types of each function's result and arguments: pointers, longs, floats, ints."""

_TYPES = {
    "": None,
    "p": ctypes.c_void_p,
    "l": ctypes.c_long,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
}


def path() -> Path:
    """Where the library is or would be; its name is a hash of its source and this CPU."""
    cpu = Path("/proc/cpuinfo")
    machine = platform.platform(terse=True) + platform.machine()
    if cpu.exists():
        lines = cpu.read_text().split("\n\n")[0].splitlines()
        machine += "".join(line for line in lines if line.startswith(("model name", "flags")))
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join((*_FLAGS, machine)).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "softmaxfree" / f"native-{key[:16]}.so"


def build() -> Path:
    """Compile the optional code for this machine's CPU: a few seconds, once.

    It needs g++ or clang++. The compiled library is written to the user's cache, where it is found
    from then on. Results are the same within rounding; SOFTMAXFREE_NATIVE=0 leaves it out.

    Returns:
        The compiled library's file.
    """
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
        for threads in (["-fopenmp"], []):  # Apple's compiler has no OpenMP
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
    """The compiled functions; None if they are not built, or left out."""
    if os.environ.get("SOFTMAXFREE_NATIVE") == "0" or not path().exists():
        return None
    found = ctypes.CDLL(str(path()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, f"softmaxfree_{name}")
        function.restype = _TYPES[result]
        function.argtypes = [_TYPES[letter] for letter in arguments]
    return found


class Native(Torch):
    """Compiled code for float32 tensors on a CPU, unless torch traces, maps or counts."""

    has_kernel_gradient: ClassVar[bool] = True

    def takes(self, *tensors: Tensor) -> bool:
        return (
            library() is not None
            and not torch._C._len_torch_dispatch_stack()  # such as FlopCounterMode
            and all(
                x.device.type == "cpu"
                and x.dtype == torch.float32
                and type(x) in (Tensor, nn.Parameter)
                and x.stride(-1) == 1
                and not is_wrapped(x)
                for x in tensors
            )
        )

    def kernel_of_tokens(
        self, tokens: Tensor, centre: Tensor, columns: Tensor, out: Tensor
    ) -> None:
        (b, n, d), m = tokens.shape, columns.shape[1]
        library().softmaxfree_kernel_of_tokens(
            tokens.data_ptr(), tokens.stride(0), tokens.stride(1), centre.data_ptr(),
            columns.data_ptr(), out.data_ptr(), out.stride(0), b, n, m, d, token_bound(tokens),
            torch.get_num_threads(),
        )  # fmt: skip

    def kernel_matrix(self, x: Tensor, y: Tensor | None, scale: float) -> Tensor:
        *leading, m, d = x.shape
        if y is not None or m > library().softmaxfree_most_landmarks():
            return super().kernel_matrix(x, y, scale)
        x = x.contiguous()
        out = x.new_empty(*leading, m, m)
        library().softmaxfree_kernel_matrix(
            x.data_ptr(), out.data_ptr(), out.numel() // (m * m), m, d, scale * TO_BASE_2,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def inverse(self, a: Tensor, ridge: Ridge, definite: bool = False) -> Tensor:
        m = a.shape[-1]
        if not isinstance(ridge, Tensor) and m <= library().softmaxfree_most_landmarks():
            a = a.contiguous()
            out = torch.empty_like(a)
            count, threads = a.numel() // (m * m), torch.get_num_threads()
            failed = library().softmaxfree_inverse(
                a.data_ptr(), out.data_ptr(), count, m, ridge, threads
            )
            if not failed and (definite or out.isfinite().all()):
                return out
        return super().inverse(a, ridge, definite)

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        out = torch.empty_like(x)
        library().softmaxfree_gelu(
            x.data_ptr(), out.data_ptr(), x.numel(), approximate == "tanh", torch.get_num_threads()
        )
        return out

    def gelu_backward(self, grad: Tensor, x: Tensor, approximate: str) -> Tensor:
        library().softmaxfree_gelu_backward(
            grad.data_ptr(), x.data_ptr(), grad.data_ptr(), x.numel(), approximate == "tanh",
            torch.get_num_threads(),
        )  # fmt: skip
        return grad

    def kernel_gradient(self, v: Tensor, grad: Tensor, weight: Tensor) -> Tensor | None:
        v, grad = v.contiguous(), grad.contiguous()
        (b, height, width, dim), heads = v.shape, len(weight)
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        done = library().softmaxfree_kernel_gradient(
            v.data_ptr(), v.stride(0), dim, grad.data_ptr(), grad.stride(0), dim, out.data_ptr(),
            b, height, width, heads, dim // heads, weight.shape[-1], torch.get_num_threads(),
        )  # fmt: skip
        return out if done else None
