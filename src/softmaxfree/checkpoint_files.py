"""Checkpoint files: their checksum, and the previous one that is kept beside the last."""

import os
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import torch

from .errors import UserError, user_file
from .files import atomic_file

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
_MARK = b"sha256 of this file with zeros here: "
_ZEROS = 64 * b"0"


def write_checkpoint(content: dict[str, Any], path: Path) -> None:
    """Saves with torch.save, and adds a checksum of the whole file.

    torch stores a checksum with every tensor, but never checks it, and does not cover the rest. Our
    checksum is in the archive's directory, in a field of an empty record that torch ignores.
    """
    with atomic_file(path) as file:
        torch.save(content, file)
        with zipfile.ZipFile(file, "a") as archive:
            record = zipfile.ZipInfo(f"{archive.namelist()[0].partition('/')[0]}/checksum")
            field = _MARK + _ZEROS
            record.extra = b"SF" + len(field).to_bytes(2, "little") + field
            archive.writestr(record, b"")
        place = _place(file)
        assert place is not None
        digest = _digest(file, place)
        file.seek(place)
        file.write(digest)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is intact.

    A file without our checksum is checked by torch's own.
    """
    try:
        with user_file(path), path.open("rb") as file, zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                return "it is compressed, which no checkpoint of ours is"
            if (place := _place(file)) is not None:
                file.seek(place)
                same = file.read(len(_ZEROS)) == _digest(file, place)
                return None if same else "its checksum is wrong"
            if wrong := archive.testzip():
                return f"the checksum of {wrong} is wrong"
    except UserError:
        raise
    except Exception as error:  # whatever a broken file makes the reader raise
        return str(error).split("\n")[0].rstrip(".") or type(error).__name__
    return None


def _place(file: IO[bytes]) -> int | None:
    """The position of the checksum, if there is one, near the end of the file."""
    start = max(file.seek(0, os.SEEK_END) - 1000, 0)
    file.seek(start)
    found = file.read().rfind(_MARK)
    return None if found < 0 else start + found + len(_MARK)


def _digest(file: IO[bytes], place: int) -> bytes:
    """The checksum of a file, with zeros in place of the checksum, in hexadecimal digits."""
    digest, left = sha256(), place
    file.seek(0)
    while left and (chunk := file.read(min(left, 2**20))):
        digest.update(chunk)
        left -= len(chunk)
    digest.update(_ZEROS)
    file.seek(place + len(_ZEROS))
    digest.update(file.read())
    return digest.hexdigest().encode()


def sound_checkpoint(path: Path) -> Path:
    """The file itself or, if last.ckpt is damaged, previous.ckpt, with a line that says so.

    Every reader of a run's checkpoint begins here.
    """
    previous = path.with_name(PREVIOUS)
    spare = path.name == LAST and previous.is_file()
    if not path.is_file():
        if not spare:
            raise UserError(f"there is no checkpoint {path}; give the path of a run's {LAST}")
        wrong: str | None = "is not there"
    else:
        reason = damage(path)
        wrong = reason and f"cannot be read as a checkpoint ({reason})"
    if not wrong:
        return path
    if not spare or damage(previous):
        also = f", and so is {PREVIOUS} beside it" if spare else ""
        raise UserError(f"{path} {wrong}: it is truncated or damaged, or not of a run{also}")
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(
            f"softmaxfree: {path} {wrong}; the checkpoint before it, {previous}, is taken",
            file=sys.stderr,
        )
    return previous


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run that can be resumed."""
    return (folder / LAST).exists() or (folder / PREVIOUS).exists()


def keep_previous(last: Path) -> None:
    """Keeps last.ckpt, which is about to be replaced, as previous.ckpt."""
    if not last.is_file():
        return
    previous = last.with_name(PREVIOUS)
    unfinished = last.with_name(f".{PREVIOUS}.link")
    with user_file(previous, "write"):
        unfinished.unlink(missing_ok=True)
        try:
            os.link(last, unfinished)
        except OSError:  # on a file system without links there is no last.ckpt for a moment
            os.replace(last, previous)
        else:
            os.replace(unfinished, previous)
