"""Safe access to files that a user or a data set names."""

import os
import stat
from pathlib import Path, PurePath
from typing import IO

from ..errors import UserError, user_file


def open_file(path: Path) -> IO[bytes]:
    """Opens a file for reading; rejects pipes and devices, which may block for ever.

    Raises:
        OSError: As `open`, for a missing or unreadable file.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise UserError(f"{shown(path)} is {kind}, not a file: give the path of a file")
    return path.open("rb")


def read_file(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of a file; raises UserError if it cannot be read.

    Args:
        most_bytes: Largest size.
    """
    with user_file(shown(path)), open_file(path) as file:
        content = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(content) > most_bytes:
        raise UserError(f"{shown(path)} has more than {most_bytes >> 20} MB: it is no such file")
    return content


def below(folder: Path, name: str) -> Path:
    """The path that a data set names; raises UserError if it is not below the folder.

    Symbolic links are followed: the folder's owner made them, not a name in a file.
    """
    parts = PurePath(name).parts
    if (
        not parts
        or PurePath(name).is_absolute()
        or ".." in parts
        or "\0" in name
        or _encoded(name) is None
    ):
        raise UserError(
            f"{shown(name)!r} is no name of a file below {shown(folder)}: "
            "names may not be empty, begin with /, have .. in them or half a character"
        )
    return folder / name


def shown(path: PurePath | str) -> str:
    """A path for messages; bytes that are not UTF-8 and control characters are escaped."""
    encoded = _encoded(path)
    text = str(path) if encoded is None else encoded.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _encoded(path: PurePath | str) -> bytes | None:
    """A path as the system has it; None if it has a lone surrogate, which no file's name can."""
    try:
        return os.fsencode(path)
    except UnicodeEncodeError:
        return None
