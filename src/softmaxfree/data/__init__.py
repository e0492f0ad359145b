"""Data sets, transforms and loaders that feed the tasks."""

from .images import ImageData

__all__ = ["ImageData"]
