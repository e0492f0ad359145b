"""Data sets, transforms and loaders that feed the tasks."""

from .detection import DetectionData
from .images import ImageData
from .segmentation import SegmentationData
from .sequence_data import SequenceData

__all__ = ["DetectionData", "ImageData", "SegmentationData", "SequenceData"]
