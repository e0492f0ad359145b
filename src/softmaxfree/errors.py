"""Mistakes that a user can put right, told apart from bugs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar


class UserError(ValueError):
    """Wrong input: one sentence says what came, what was expected and what to do.

    The command line prints the sentence alone. Any other exception is a bug, and keeps its
    traceback.
    """

    exit_code: ClassVar[int] = 1
    """The status that a command ends with."""


class DivergedError(UserError):
    """The loss or the weights are no longer finite. The last checkpoint before that is kept."""

    exit_code = 3


@contextmanager
def user_file(path: Path | str, purpose: str = "read") -> Iterator[None]:
    """Turns the system's refusal to open a path of the user's into a `UserError`.

    Args:
        path: What is opened inside of the context.
        purpose: What for, as a verb: "read" or "write".
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot {purpose} {path}: {reason}") from error


def visible(text: object) -> str:
    """Text from a file, for a terminal: one line, in which control characters are spelt out.

    An escape sequence could otherwise hide or forge what else is printed.
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(text)
    )
