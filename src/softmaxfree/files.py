"""Atomic writing of files, and where recipes are."""

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from .errors import UserError, user_file


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file to write to, which replaces the old one when it is complete and on the disk."""
    with user_file(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path))
        try:
            with os.fdopen(handle, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file completely or, if the process is stopped, leaves the old one."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_folder_of(path: Path) -> None:
    """Raises UserError if the folder that a file is to be written to does not exist."""
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write to: create it first")


def write_picture(path: Path, picture: Any) -> None:
    """Writes an image of PIL or a figure of matplotlib atomically, as PNG."""
    buffer = io.BytesIO()
    if hasattr(picture, "savefig"):
        picture.savefig(buffer, format="png", dpi=120)
    else:
        picture.save(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def append(path: Path, line: bytes) -> None:
    """Appends a line to a file, after ending a line that a kill has cut short.

    A symbolic link or a pipe is replaced by a file, as in `atomic_file`, so that the folder's maker
    cannot choose another file to be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.is_fifo():
        path.unlink()
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, 0o666), "ab+") as file:
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line + b"\n")


def remove_unfinished(path: Path) -> None:
    """Removes the unfinished files that a killed process left of writing this one."""
    for unfinished in path.parent.glob(f"{_prefix(path)}*"):
        unfinished.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name}."


def recipe(name: str) -> Path:
    """The file of a recipe, in the installed package or at the root of the working copy.

    Args:
        name: Such as cifar10/softpp_nano; recipes/cifar10/softpp_nano.yaml is the same.
    """
    here = Path(__file__).parent
    folders = [path for path in (here / "recipes", here.parents[1] / "recipes") if path.is_dir()]
    stem = name.removeprefix("recipes/").removesuffix(".yaml")
    for folder in folders:
        if (folder / f"{stem}.yaml").is_file():
            return folder / f"{stem}.yaml"
    known = [
        path.relative_to(folder).as_posix().removesuffix(".yaml")
        for folder in folders
        for path in sorted(folder.rglob("*.yaml"))
    ]
    near = ", ".join(get_close_matches(stem, known) or known)
    raise UserError(f"there is no file {name} and no recipe of that name: give one of {near}")
