"""What is trained and scored."""

from .classification import Classification
from .detection import Detection
from .segmentation import Segmentation
from .task import Task

__all__ = ["Classification", "Detection", "Segmentation", "Task"]
