"""What benchmarks, too, import before they start."""

from ..modules import import_modules

__all__ = ["import_modules"]
