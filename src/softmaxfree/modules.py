"""Modules of one's own, which register attentions and models, imported before a command runs."""

import importlib
import sys
from pathlib import Path

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
        importlib.import_module(name)
