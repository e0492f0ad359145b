"""Looking into a model: its attention matrices, and how near they are to failing."""

from .diagnosis import diagnose
from .hooks import recorded_attention
from .rows import attention_rows

__all__ = ["attention_rows", "diagnose", "recorded_attention"]
