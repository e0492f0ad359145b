"""The files of `softmaxfree predict`: images by name, folder or pattern, and what is found."""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from ..data.image_files import SUFFIXES, ImageFileError, read_image
from ..data.paths import shown
from ..errors import UserError, user_file, visible
from ..files import atomic_file, write_picture

TABLES = (".jsonl", ".csv")
"""What the names of files for what is found end in."""

Entries = list[dict[str, Any]]
"""What is found on an image: classes, objects or shares of the area."""


def find_images(names: Iterable[str | Path]) -> list[Path]:
    """Files as named, all images in and below folders, and what patterns such as *.jpg match."""
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES]
            found += [file for file in inside if file.is_file() and file.name[0] != "."]
            if not inside:
                raise UserError(
                    f"there are no images in {shown(path)}, nor below it: their names must end in "
                    f"{', '.join(SUFFIXES)}"
                )
        elif any(sign in str(name) for sign in "*?[") and not path.exists():
            matched = [Path(file) for file in sorted(glob(str(name), recursive=True))]
            if not (files := [file for file in matched if not file.is_dir()]):
                raise UserError(
                    f"no file matches {shown(path)}: check the pattern; ** stands for all folders"
                )
            found += files
        else:
            found.append(path)
    return list(dict.fromkeys(found))


class Reader:
    """Reads images one after the other; those that cannot be read are reported and left out."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths, self.failed = paths, 0

    def __call__(self, prepare: Callable[[Image.Image], Any]) -> Iterator[tuple[Path, Any]]:
        """Yields files and what is made of their images; raises UserError if the only one fails."""
        alone = len(self.paths) == 1
        for path in tqdm(self.paths, unit="image", leave=False, disable=alone or None):
            try:
                prepared = prepare(read_image(path))
            except UserError as error:
                named = isinstance(error, ImageFileError)
                wrong = error if named else UserError(f"{shown(path)}: {error}")
                if alone:
                    raise wrong from error
                tqdm.write(f"softmaxfree: error: {wrong}", file=sys.stderr)
                self.failed += 1
                continue
            yield path, prepared

    def finish(self) -> None:
        """Raises UserError if images could not be read."""
        if self.failed == len(self.paths):
            raise UserError(f"none of the {self.failed} images could be read, see above")
        if self.failed:
            raise UserError(
                f"{self.failed} of {len(self.paths)} images could not be read, see above; the "
                "others are done"
            )


class Pictures:
    """Writes pictures to a folder, under the names of their images."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.taken = folder, set[str]()
        with user_file(folder, "write to"):
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, pictures: dict[str, Image.Image]) -> str:
        """Writes an image's pictures, numbered if the name is taken; returns where they are.

        Args:
            path: The image's file.
            pictures: By what is added to the name.
        """
        name = path.stem
        if name in self.taken:
            name = f"{name}-{len(self.taken) + 1}"
        self.taken.add(name)
        files = [self.folder / f"{name}{added}.png" for added in pictures]
        for file, picture in zip(files, pictures.values()):
            write_picture(file, picture)
        return f": drawn in {' and '.join(map(visible, files))}"


@contextmanager
def table(path: Path | None, columns: Sequence[str]) -> Iterator[Callable[[Path, Entries], None]]:
    """Writes what is found on images: a line for each image (.jsonl) or for each entry (.csv).

    Args:
        path: The file; None to write nothing.
        columns: Names of an entry's values in CSV; those of a box are x, y, width and height.
    """
    if path is None:
        yield lambda image, entries: None
        return
    with atomic_file(path) as file:
        # Names of files need not be in UTF-8.
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="", write_through=True)
        rows = csv.DictWriter(text, ["image", *columns], extrasaction="ignore")

        def write(image: Path, entries: Entries) -> None:
            if path.suffix == ".jsonl":
                text.write(json.dumps({"image": str(image), "found": entries}) + "\n")
                return
            for entry in entries:
                box = zip(("x", "y", "width", "height"), entry.get("bbox", ()))
                rows.writerow({"image": str(image), **entry, **dict(box)})

        if path.suffix == ".csv":
            rows.writeheader()
        yield write
        text.detach()
