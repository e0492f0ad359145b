"""What both packages compute the shared vectors from; numpy alone, the same in every version."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SIZES = {"224x224": (224, 224), "256x192": (256, 192)}
"""Images of the large model."""

METHODS = ("rescaled", "newton", "paper", "damped", "backtrack")

SAMPLERS = {
    f"{sampler}_{name}": {"sampler": sampler, **options}
    for sampler in ("conv", "avg", "random", "biased")
    for name, options in {
        "ratio": {"ratio": 3, "num_landmarks": None, "pad": "replicate"},
        "drop": {"ratio": 3, "num_landmarks": None, "pad": "drop"},
        "num_landmarks": {"ratio": 2, "num_landmarks": 4, "pad": "replicate"},
    }.items()
}
"""Arguments of each case, on a grid of 7 x 5."""

ATTENTIONS = {
    "soft": {"normalize": False},
    "softpp": {"normalize": True},
    "rows": {"normalize": False, "rows": True},
    "sums": {"middle": "sums"},
}
"""Arguments of each case; the last two have weights of keys."""

LAYERS = {
    "softpp": {"normalize": True},
    "soft": {"normalize": False},
    "untied": {"tie_qk": False},
    "newton": {"inverse": "newton", "rows": True, "sampler": "avg", "qkv_bias": False},
    "rows": {"rows": True, "key_weights": True, "tie_qk": False, "landmarks_of": "keys"},
    "softx": {
        "middle": "sums",
        "key_weights": True,
        "tie_qk": False,
        "gate": True,
        "sampler": "avg",
        "landmark_norm": False,
        "value_conv_per_channel": True,
    },
    "softx_tied": {"middle": "sums", "key_weights": True},
}
"""Arguments of each case, beside those of all."""
LAYER = {"dim": 16, "num_heads": 2, "ratio": 2, "value_conv": 3, "prefix_tokens": 1}

SOFTX = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "num_classes": 10}
"""Arguments of a small `softx_nano`."""


def normal(name: str, *shape: int) -> np.ndarray:
    """Normal numbers that follow from a name."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    return random.standard_normal(shape).astype(np.float32)


def kernels() -> np.ndarray:
    """Well and badly conditioned kernel matrices, (3, 9, 9)."""
    x = normal("kernels", 3, 9, 4).astype(np.float64) * np.array([2.0, 1.0, 0.5])[:, None, None]
    squared = np.square(x[:, :, None] - x[:, None]).sum(-1)
    return np.exp(-squared / 2).astype(np.float32)


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Weights of a model that follow from their names, of a size that keeps signals alive."""
    return {name: _weight(name, tuple(shapes[name])) for name in sorted(shapes)}


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    drawn = normal(name, *shape)
    if name.endswith("running_var"):
        return 1 + 0.5 * np.abs(drawn)
    if name.endswith("weight") and len(shape) == 1:  # of a normalisation
        return 1 + 0.2 * drawn
    if name.endswith("weight"):
        return drawn * np.float32(np.prod(shape[1:]) ** -0.5)
    return 0.2 * drawn


def write_weights(shapes: Mapping[str, tuple[int, ...]], path: Path) -> np.ndarray:
    """Writes them as a file of softmaxfree's; returns its SHA-256, (32,) bytes."""
    save_file(weights(shapes), path, metadata={"format": "pt"})
    return np.frombuffer(hashlib.sha256(path.read_bytes()).digest(), np.uint8)


def encoded(table: Any) -> np.ndarray:
    """A table as the bytes of its JSON."""
    return np.frombuffer(json.dumps(table, sort_keys=True).encode(), np.uint8)


def decoded(array: np.ndarray) -> Any:
    return json.loads(array.tobytes())
