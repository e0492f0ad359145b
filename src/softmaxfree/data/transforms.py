"""timm's transforms, with what Pillow refuses put right."""

from typing import Any

from timm.data import create_transform
from timm.data.auto_augment import posterize


def training_transform(size: int, **arguments: Any) -> Any:
    """timm's transform of a training image: PIL image -> (3, size, size)."""
    transform = create_transform(size, is_training=True, **arguments)
    for part in transform.transforms:
        policies = [op for policy in getattr(part, "policy", []) for op in policy]
        for op in [*getattr(part, "ops", []), *policies]:
            if op.name.startswith("Posterize"):
                op.aug_fn = _posterize
    return transform


def _posterize(image: Any, bits: int, **_: Any) -> Any:
    """At the highest magnitudes timm asks for 0 bits, which Pillow 12 and later refuse."""
    return posterize(image, max(bits, 1))
