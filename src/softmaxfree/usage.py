"""Mistakes on the command line: what jsonargparse says of them, as one sentence."""

import re
from collections.abc import Collection
from difflib import get_close_matches

from .errors import UserError


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
        names = [f"{option}.{name}" if keys else name for name in found[1].split(", ")]
        words = [f"--{name}" if name in options else name for name in names]
        return UsageError(f"{' and '.join(words)} must be given; --help explains")
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


def unknown_command(program: str, word: str, commands: Collection[str]) -> UsageError:
    """Says that a program has no such command, and which are like it, or all."""
    near = " or ".join(get_close_matches(word, commands))
    hint = f"did you mean {near}?" if near else f"choose one of {', '.join(commands)}"
    return UsageError(f"{program} has no command {word!r}; {hint}")


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
