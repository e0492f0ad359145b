"""What is trained and scored."""

from .classification import Classification
from .task import Task

__all__ = ["Classification", "Task"]
