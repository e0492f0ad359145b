"""The words of a command line: how they become a call of a function."""

import json
import re
from collections.abc import Callable, Container
from inspect import Parameter, signature
from itertools import groupby
from pathlib import Path
from typing import Any

HELP = Path(__file__).parent / "help"
"""The help of each command as text: printed without importing the command, which takes seconds."""


def help_of(command: list[str]) -> str:
    """The help of a command, such as ["bench", "speed"]."""
    return (HELP / f"{'-'.join(command)}.txt").read_text()


def call(function: Callable[..., Any], words: list[str], program: str) -> Any:
    """Calls a function with options that its signature and docstring make."""
    from jsonargparse import auto_cli

    if all(map(_is_option, signature(function).parameters.values())):
        words = with_lists(words, list_options(function))
    return auto_cli(function, args=words, prog=program, exit_on_error=False, allow_abbrev=False)


def _is_option(parameter: Parameter) -> bool:
    return parameter.default is not Parameter.empty or parameter.kind is Parameter.VAR_KEYWORD


def with_lists(words: list[str], lists: Container[str] = ()) -> list[str]:
    """Several words after an option as one list: --sizes 16 32 is --sizes [16,32].

    Args:
        words: All of them options and their values, without positional arguments.
        lists: Options that take a list, also of one word.
    """
    found: list[str] = []
    for is_option, group in groupby(words, lambda word: word.startswith("--")):
        values = list(group)
        one = found and found[-1] in lists and values[0][:1] != "[" and values[0] != "null"
        joined = f"[{','.join(map(_quoted, values))}]"
        found += values if is_option or not (len(values) > 1 or one) else [joined]
    return found


def _quoted(word: str) -> str:
    """A word as YAML takes it within brackets; only what means something there is quoted."""
    return word if re.fullmatch(r"[\w./+-]*", word) else json.dumps(word)


def list_options(function: Callable[..., Any], prefix: str = "--") -> set[str]:
    """The options of a function or class that take a list."""
    parameters = signature(function).parameters
    return {f"{prefix}{name}" for name in parameters if _takes_list(parameters[name].annotation)}


def _takes_list(annotation: object) -> bool:
    return str(annotation).startswith("list[")
