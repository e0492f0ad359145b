"""The help of every command but fit, validate and test, whose help is written by hand.

    python -m tests.help_texts

writes it anew to src/softmaxfree/help; `tests/test_options.py` fails where it is out of date.
"""

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from jsonargparse import ArgumentParser

from softmaxfree.cli import COMMANDS, Command, Commands, run_command
from softmaxfree.words import HELP

BY_HAND = ("fit", "validate", "test")


class ParserMade(Exception):  # noqa: N818 (not an error)
    """Carries the parser of a command that was about to parse its words."""


def all_commands(commands: Commands = COMMANDS, *group: str) -> Iterator[tuple[str, ...]]:
    for name, entry in commands.items():
        if isinstance(entry, Command):
            yield (*group, name)
        else:
            yield from all_commands(entry.commands, *group, name)


def parser_of(words: tuple[str, ...]) -> ArgumentParser:
    """The parser that a command makes."""

    def stop(self: ArgumentParser, *_: Any, **__: Any) -> None:
        raise ParserMade(self)

    try:
        with patch.object(ArgumentParser, "parse_args", stop):
            run_command([*words, "--config=fsdp"])
    except ParserMade as made:
        return made.args[0]
    raise AssertionError(f"{words} has parsed nothing")


def help_of(parser: ArgumentParser) -> str:
    """Its help on a terminal of 100 columns."""
    with patch.dict(os.environ, {"COLUMNS": "100"}):
        return "\n".join(line.rstrip() for line in parser.format_help().splitlines()) + "\n"


if __name__ == "__main__":
    for command in all_commands():
        if command[0] not in BY_HAND:
            (HELP / f"{'-'.join(command)}.txt").write_text(help_of(parser_of(command)))
