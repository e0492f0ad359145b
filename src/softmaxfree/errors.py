"""Errors that a user can correct, as opposed to bugs."""

import os
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

LARGEST_SIZE = 4096
"""Largest side that images may be resized to, in pixels."""


class UserError(ValueError):
    """Wrong input: one sentence says what came, what was expected and what to do.

    The command line prints the sentence alone. Any other exception is a bug, and keeps its
    traceback.
    """

    exit_code: ClassVar[int] = 1
    """The exit status of the command."""


class DivergedError(UserError):
    """The loss or a weight is no longer finite; the last checkpoint before that is kept."""

    exit_code = 3


@contextmanager
def user_file(path: Path | str, purpose: str = "read") -> Iterator[None]:
    """Turns an OSError on a path that the user gave into a `UserError`.

    Args:
        path: The file that is opened inside the context.
        purpose: "read" or "write".
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot {purpose} {path}: {reason}") from error


def check_words(words: list[str]) -> list[str]:
    """The words of a command line; raises UserError for one that is not in UTF-8.

    Values of options are parsed as YAML, which has to be. Images given to `predict` are not parsed,
    and may have any name.
    """
    for before, word in zip(["", *words], words):
        is_image = words[0] == "predict" and not before.startswith("--") and word[:2] != "--"
        if not is_image and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UserError(
                f"{word} is not in UTF-8, as the arguments of this command must be: rename the "
                "file, or make a link to it with another name"
            )
    return words


def visible(text: object) -> str:
    """Text from a file for a terminal: one line, with control characters spelt out.

    An escape sequence could otherwise hide or forge other output.
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(text)
    )


def check_size(size: int | Iterable[int] | None, option: str = "--size") -> None:
    """Raises UserError for a side of images that has no pixels or would fill the memory."""
    for side in size if isinstance(size, Iterable) else [size]:
        if side is not None and not 1 <= side <= LARGEST_SIZE:
            raise UserError(f"{option} must be from 1 to {LARGEST_SIZE} pixels, got {side}")


def reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as in `... | head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLOUT)
    left = any(event & select.POLLERR for _, event in output.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
    return left
