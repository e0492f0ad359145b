"""The origin of a number: commit, hardware, versions, memory and command."""

import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .errors import UserError


def chosen_device(given: str | None) -> str:
    """The device as given, or a GPU if there is one; raises UserError for one that is not here."""
    if given == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was given, but torch finds no GPU; use --device cpu")
    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def commit() -> str | None:
    """The commit of the working copy that this package runs from; None if installed."""

    def git(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "HEAD") + ("-modified" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def hardware() -> dict[str, Any]:
    """CPU, cores, system and GPU of this machine."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system()}
    found["capability"] = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """The versions of Python, this package and its main dependencies."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("softmaxfree", "timm", "lightning", "torchvision"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def process_bytes(field: str) -> int | None:
    """A field of Linux's /proc/self/status, in bytes; None on other systems."""
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def largest_memory() -> int:
    """The peak memory of this process in bytes."""
    # getrusage includes the process that started this one.
    return process_bytes("VmHWM") or largest_ever()


def largest_ever() -> int:
    """The peak memory of this process, or of the one that started it, in bytes."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def program() -> str:
    """What to type before a command's name to run it from the current folder."""
    started = Path(sys.argv[0])
    if started.stem != "softmaxfree":
        return shlex.join([sys.executable, "-m", "softmaxfree"])
    found = shutil.which("softmaxfree")
    if found and Path(found).resolve() == started.resolve():
        return "softmaxfree"
    here = Path.cwd()
    return shlex.quote(str(started.relative_to(here) if started.is_relative_to(here) else started))


def command_line() -> str:
    """The running command, as a user would type it."""
    return shlex.join(["softmaxfree", *sys.argv[1:]])
