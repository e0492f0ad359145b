"""Files that are there whole or not at all, and where recipes are."""

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .errors import UserError, user_file


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, in place of the old one once it is whole and on the disk."""
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
    """The whole file or, if stopped on the way, the old one."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_picture(path: Path, picture: Any) -> None:
    """An image of PIL's or a figure of matplotlib's as a PNG, whole or not at all."""
    buffer = io.BytesIO()
    if hasattr(picture, "savefig"):
        picture.savefig(buffer, format="png", dpi=120)
    else:
        picture.save(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def append(path: Path, line: bytes) -> None:
    """Adds a line to a file, after the end of one that was torn by a kill.

    A symbolic link, or a pipe, is replaced by a file, as in `atomic_file`: whoever made the folder
    does not choose what else is written to.
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
    """Removes what a process that was killed left of writing a file."""
    for unfinished in path.parent.glob(f"{_prefix(path)}*"):
        unfinished.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name}."


def recipe(name: str) -> Path:
    """A recipe's file: in the installed package, or at the root of the working copy."""
    here = Path(__file__).parent
    for folder in (here / "recipes", here.parents[1] / "recipes"):
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"there is no recipe {name}")
