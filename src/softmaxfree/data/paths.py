"""Files that a user or a data set names: opened if they are files, and where they should be."""

import os
import stat
from pathlib import Path, PurePath
from typing import IO

from ..errors import UserError, user_file


def open_file(path: Path) -> IO[bytes]:
    """A file to read from. Pipes and devices are refused: to open one may wait for ever.

    Raises:
        OSError: As `open`, if there is none or it may not be read.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise UserError(f"{shown(path)} is {kind}, not a file: give the path of a file")
    return path.open("rb")


def read_file(path: Path, most_bytes: int | None = None) -> bytes:
    """All of a file, or a `UserError`.

    Args:
        most_bytes: That it may have.
    """
    with user_file(shown(path)), open_file(path) as file:
        content = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(content) > most_bytes:
        raise UserError(f"{shown(path)} has more than {most_bytes >> 20} MB: it is no such file")
    return content


def below(folder: Path, name: str) -> Path:
    """A file or folder that a data set names, which must be in the folder or deeper.

    Symbolic links are followed: they are made by whoever has the folder, not by a name in a file.
    """
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts or "\0" in name:
        raise UserError(
            f"{shown(name)!r} is no name of a file below {shown(folder)}: "
            "names may not be empty, begin with / or have .. in them"
        )
    return folder / name


def shown(path: PurePath | str) -> str:
    """A path for messages: bytes that are not UTF-8, and what terminals act on, as escapes."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
