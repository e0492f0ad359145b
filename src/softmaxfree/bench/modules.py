"""Attentions of one's own: modules that register them, imported before anything is measured."""

import importlib
import sys
from pathlib import Path


def import_modules(names: list[str]) -> None:
    """Imports modules by name, from the current folder too."""
    if names and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in names:
        importlib.import_module(name)
