"""Modules of one's own, imported before a command runs, and those that an extra brings."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError

MODULES = "Python modules to import first, which register attentions of your own."
Names = list[str] | str | None
"""As given on the command line: [one,two], or one alone."""


def listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


def import_modules(names: Names) -> None:
    """Imports modules by name, from the current folder too."""
    if names and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in listed(names):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports one that is not
            raise UserError(
                f"there is no module {name}, neither here nor installed; check --modules"
            ) from error


@contextmanager
def needs(extra: str, what: str = "this") -> Iterator[None]:
    """Says how to install what an import inside of it does not find."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what} needs {error.name}; install it with: pip install 'softmaxfree[{extra}]'"
        ) from error
