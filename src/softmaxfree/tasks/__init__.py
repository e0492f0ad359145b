"""What is trained and scored."""

from .classification import Classification
from .detection import Detection
from .task import Task

__all__ = ["Classification", "Detection", "Task"]
