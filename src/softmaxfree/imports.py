"""Imports that may fail: a user's own modules, and packages that an extra brings."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError

MODULES = "Python modules to import first, which register attentions of your own."
Names = list[str] | str | None
"""The type of --modules: [one,two], or a single name."""


def listed(names: Names) -> list[str]:
    """The names of --modules as a list."""
    return [names] if isinstance(names, str) else list(names or [])


def import_modules(names: Names) -> None:
    """Imports modules by name, from the current folder or from where they are installed."""
    if names and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in listed(names):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module itself exists, but one that it imports does not
            raise UserError(
                f"there is no module {name}, neither here nor installed; check --modules"
            ) from error


@contextmanager
def needs(extra: str, what: str = "this") -> Iterator[None]:
    """Says how to install a package that an import in this context does not find.

    Args:
        extra: The extra that brings the package; "" if none does, and the error is a bug.
        what: What needs the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not extra or (error.name or "softmaxfree").startswith("softmaxfree"):
            raise
        raise UserError(
            f"{what} needs {error.name}; install it with: pip install 'softmaxfree[{extra}]'"
        ) from error
