"""Checkpoints as files: whether one is whole, and the one before it, which is kept beside it."""

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
_MARK = b"sha256 of what is before: "


def write_checkpoint(content: dict[str, Any], path: Path) -> None:
    """What torch saves, with a checksum of all its bytes in the comment that a zip file may have.

    torch stores a checksum with every tensor, but neither looks at it nor covers the rest.
    """
    with atomic_file(path) as file:
        hashing = _Hashing(file)
        torch.save(content, hashing)  # type: ignore[arg-type]
        file.seek(-2, os.SEEK_END)  # the length of the comment, so far 0
        file.write(_comment(hashing.digest.hexdigest()))


class _Hashing:
    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; nothing if it is what was written.

    A file without our checksum is looked at for torch's own.
    """
    try:
        with user_file(path), path.open("rb") as file, zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                return "it is compressed, which no checkpoint of ours is"
            if (stored := _stored(file)) is not None:
                return None if stored == _comment(_computed(file)) else "its checksum is wrong"
            if wrong := archive.testzip():
                return f"the checksum of {wrong} is wrong"
    except UserError:
        raise
    except Exception as error:  # whatever a broken file makes the reader raise
        return str(error).split("\n")[0].rstrip(".") or type(error).__name__
    return None


def _comment(digest: str) -> bytes:
    """The end of a file, from the length of its comment on."""
    comment = _MARK + digest.encode()
    return len(comment).to_bytes(2, "little") + comment


_END = len(_comment(64 * "0"))


def _stored(file: IO[bytes]) -> bytes | None:
    file.seek(-_END, os.SEEK_END)
    end = file.read()
    return end if end[2:].startswith(_MARK) else None


def _computed(file: IO[bytes]) -> str:
    """The checksum of all before the comment, as it was when that had no length."""
    left, digest = file.seek(-_END, os.SEEK_END), sha256()
    file.seek(0)
    while left and (chunk := file.read(min(left, 2**20))):
        digest.update(chunk)
        left -= len(chunk)
    digest.update(b"\0\0")
    return digest.hexdigest()


def sound_checkpoint(path: Path) -> Path:
    """The file itself, or in place of a damaged last.ckpt the one before it, with a line on that.

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
        raise UserError(f"{path} {wrong}: it is truncated or damaged, or none of a run{also}")
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(
            f"softmaxfree: {path} {wrong}; the checkpoint before it, {previous}, is taken",
            file=sys.stderr,
        )
    return previous


def holds_run(folder: Path) -> bool:
    """Whether there is a run to go on with."""
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
        except OSError:  # a file system without links: there is no last.ckpt for a moment
            os.replace(last, previous)
        else:
            os.replace(unfinished, previous)
