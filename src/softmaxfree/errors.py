"""Errors that a user can correct, as opposed to bugs."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar


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


class UsageError(UserError):
    """A word on the command line, or in a configuration, that is not understood."""

    exit_code = 2


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "dict": "a mapping such as {name: value}",
}


def usage_error(message: str, options: Collection[str], place: str = "") -> UsageError:
    """A message of jsonargparse, which has up to ten lines, as one sentence.

    Args:
        message: The message.
        options: Names of all options, without dashes.
        place: Where the mistake is, such as " in FILE".
    """
    keys = re.findall(r'Parser key "([^"]+)"', message)
    option = f"--{'.'.join(keys)}"
    if found := re.search(r"Option '([^']+)' is not accepted", message):
        return _unknown(".".join([*keys, found[1]]), options, place)
    if found := re.search(r"unrecognized arguments: --([^\s=]+)", message):
        return _unknown(found[1], options, "")
    if found := re.search(r"unrecognized arguments: (.*)", message):
        return UsageError(f"{found[1]!r} is not expected here; --help lists the options")
    if found := re.search(r"arguments are required: (.*)", message):
        names = found[1] if not keys else ", ".join(f"{option}.{x}" for x in found[1].split(", "))
        return UsageError(f"{names} must be given; --help explains")
    if found := re.search(r"argument (--\S+): expected", message):
        return UsageError(f"{found[1]} needs a value")
    if found := re.search(r"File does not exist: '(.*)'", message):
        return UsageError(f"there is no file {found[1]}; check {option}")
    if found := re.search(
        r"dot import path string: (.*)|given class_path '([^']+)':\s+module", message
    ):
        return UsageError(
            f"{option} has no class {found[1] or found[2]!r}{place}; --help lists them"
        )
    inner = message.rpartition("Parser key")[2]
    given = re.search(r"(?:Got|Given) value: (.*)", inner)
    kinds = re.findall(
        r"Expected an? (?:<class '(\w+)'>|typing\.Literal\[(.*?)\](?:\n|\.|$))", inner
    )
    named = [
        _KINDS.get(kind, kind) or f"one of {words}" for kind, words in kinds if kind != "NoneType"
    ]
    if given and named:
        expected = " or ".join(dict.fromkeys(named)).replace("'", "")
        return UsageError(f"{option} must be {expected}, got {given[1]}{place}")
    return UsageError(f"{' '.join(message.split()):.300}{place}")


def _unknown(name: str, options: Collection[str], place: str) -> UsageError:
    """Says that there is no such option, and which are like it: lr for learning_rate too."""
    last = {option: option.rpartition(".")[2] for option in options}
    word = name.rpartition(".")[2]
    same = [
        option
        for option, end in last.items()
        if word in (end, _initials(end)) or _initials(word) == end
    ]
    near = get_close_matches(name, options, 3) or [
        option
        for end in get_close_matches(word, last.values(), 2)
        for option in last
        if last[option] == end
    ]
    meant = " or ".join(f"--{option}" for option in dict.fromkeys(same or near))
    hint = f"did you mean {meant}?" if meant else "--help lists the options"
    return UsageError(f"there is no option --{name}{place}; {hint}")


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


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
