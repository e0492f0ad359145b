"""The words of a command line."""

from collections.abc import Callable, Container
from inspect import signature
from itertools import groupby
from typing import Any


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
        found += values if is_option or not (len(values) > 1 or one) else [f"[{','.join(values)}]"]
    return found


def list_options(function: Callable[..., Any], prefix: str = "--") -> set[str]:
    """The options of a function or class that take a list."""
    parameters = signature(function).parameters
    return {f"{prefix}{name}" for name in parameters if _takes_list(parameters[name].annotation)}


def _takes_list(annotation: object) -> bool:
    return str(annotation).startswith("list[")
