"""Checkpoints as files: whether one is whole, and the one before it, which is kept beside it."""

import os
import sys
import zipfile
from pathlib import Path

from .errors import UserError, user_file

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"


def damage(path: Path) -> str | None:
    """What is wrong with a file that torch saved; nothing if it is what was written.

    torch stores a checksum with every tensor, and does not look at it when it reads.
    """
    try:
        with user_file(path), zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                return "it is compressed, which no checkpoint of ours is"
            wrong = archive.testzip()
    except UserError:
        raise
    except Exception as error:  # whatever a broken file makes the reader raise
        return str(error).rstrip(".") or type(error).__name__
    return f"the checksum of {wrong} is wrong" if wrong else None


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
