"""What is trained and scored."""

from .classification import Classification
from .detection import Detection
from .segmentation import Segmentation
from .sequence_classification import SequenceClassification
from .task import Task

__all__ = ["Classification", "Detection", "Segmentation", "SequenceClassification", "Task"]
