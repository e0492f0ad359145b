"""The vectors that keep the MindSpore distribution in step are still what this package gives."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

FOLDER = Path(__file__).parents[1] / "mindspore" / "tests" / "vectors"


@pytest.mark.slow
def test_shared_vectors() -> None:
    spec = importlib.util.spec_from_file_location("mindspore_vectors", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    stored, computed = load_file(FOLDER / "vectors.safetensors"), make.compute()
    assert set(stored) == set(computed)
    for name, expected in stored.items():
        if expected.dtype.kind == "f":
            scale = max(1.0, np.abs(expected).max())
            np.testing.assert_allclose(computed[name], expected, 0, 1e-4 * scale, err_msg=name)
        else:
            assert np.array_equal(computed[name], expected), name
