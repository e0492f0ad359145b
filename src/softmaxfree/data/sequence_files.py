"""Files of the Long Range Arena's tasks, as tokens.

The token 0 is padding, as in the benchmark; words and bytes count from 1. Grey values do not: black
pixels have the token 0 and are masked like padding, in the benchmark and here.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import UserError, user_file
from . import listops
from .image_files import load_numbers
from .paths import open_file, read_file, shown
from .sources import Source, View

Numbers = NDArray[np.int64]
Row = tuple[tuple[Numbers, ...], int]
"""Tokens of one sequence or of a pair, and the class."""

_LUMA = np.array([0.2989, 0.587, 0.114], dtype=np.float32)
_SIDE = 32
LONGEST_EXPRESSION = 2**20
"""Largest line of ListOps, in bytes; the benchmark's have up to 20,000."""
_LONGEST_TEXT = 2**24
"""Largest line or file of text, in bytes."""


class GeneratedExpressions(Source):
    """Expressions of ListOps, generated on demand and the same in all runs.

    Args:
        longest: All are shorter than this, because a truncated expression has no value, and longer
            than a quarter of it: the benchmark's have 500 to 2000 words.
    """

    def __init__(self, part: str, longest: int = 2000) -> None:
        self.part, self.longest = part, longest

    def __len__(self) -> int:
        return 96_000 if self.part == "train" else 2000

    def load(self, index: int) -> Row:
        bounds = self.longest // 4, self.longest
        expression, value = listops.generate(0, self.part, index, *bounds)
        return (_words(expression),), value

    def describe(self, index: int) -> str:
        return f"listops {self.part}[{index}]"


class Lines(Source):
    """Samples in the lines of a file that stays on disk; only the line starts are in memory.

    Args:
        parse: Converts a line to a sample.
        header: Expected first line, if that is not a sample.
        longest: Largest number of bytes in a line.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], Row],
        header: str = "",
        longest: int = _LONGEST_TEXT,
    ) -> None:
        self.path, self.parse = path, parse
        starts, position, number = [], 0, 0
        with user_file(shown(path)), open_file(path) as file:
            while line := file.readline(longest + 1):
                number += 1
                if len(line) > longest:
                    raise UserError(
                        f"line {number} of {shown(path)} has more than {longest >> 20} MB, "
                        "which no sample has: check the file"
                    )
                if number == 1 and header:
                    if line.decode(errors="replace").rstrip("\r\n") != header:
                        raise UserError(f"{shown(path)} does not start with the line {header!r}")
                elif line.strip():
                    starts.append(position)
                position += len(line)
        if header and not number:
            raise UserError(f"{shown(path)} does not start with the line {header!r}")
        self.starts = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def load(self, index: int) -> Row:
        with self.path.open("rb") as file:
            file.seek(self.starts[index])
            return self.parse(file.readline().rstrip(b"\r\n"))

    def describe(self, index: int) -> str:
        return f"{self.path}[{index}]"


class Files(Source):
    """Files with one sample each.

    Args:
        names: File names below the folder, with their classes.
        parse: Converts a file to tokens.
    """

    def __init__(
        self, folder: Path, names: list[tuple[str, int]], parse: Callable[[Path], Numbers]
    ) -> None:
        self.folder, self.names, self.parse = folder, names, parse

    def __len__(self) -> int:
        return len(self.names)

    def load(self, index: int) -> Row:
        name, label = self.names[index]
        return (self.parse(self.folder / name),), label

    def describe(self, index: int) -> str:
        return shown(self.folder / self.names[index][0])


class GreyImages(View):
    """Labelled colour images as the grey values of their pixels, row by row."""

    def load(self, index: int) -> Row:
        image, label = super().load(index)
        return (grey(image),), label


def grey(image: Image.Image) -> Numbers:
    """Grey values 0 to 255 of an RGB image, with TensorFlow's weights and rounding."""
    colours = np.asarray(_checked_size(image), dtype=np.float32) * np.float32(1 / 255)
    return (colours @ _LUMA * np.float32(255.5)).astype(np.int64).flatten()


def contours(path: Path) -> Numbers:
    """Grey values of an image of Pathfinder."""
    return np.asarray(_checked_size(load_numbers(path)).convert("L"), dtype=np.int64).flatten()


def text(path: Path) -> Numbers:
    """Bytes of a text file."""
    return _bytes(read_file(path, _LONGEST_TEXT))


def expression(line: bytes) -> Row:
    """An expression of ListOps and its value."""
    words, value = listops.read_row(line.decode())
    return (_words(words),), value


def review(line: bytes) -> Row:
    """A JSON object with a text and a label."""
    match _json(line):
        case {"text": str(content), "label": 0 | 1 as label}:
            return (_bytes(_encoded(content)),), int(label)
    raise UserError("it is not a JSON object with a text and a label of 0 or 1")


def pair(line: bytes) -> Row:
    """Class, names and texts of two papers, as in the release."""
    label, _, _, first, second = _columns(line, 5)
    return (_bytes(first), _bytes(second)), _label(label)


def named_pair(papers: dict[bytes, bytes], line: bytes) -> Row:
    """Class and names of two papers; their texts are in papers."""
    label, *names = _columns(line, 3)
    if unknown := next((name for name in names if name not in papers), None):
        raise UserError(f"there is no paper {unknown.decode()} in papers.jsonl")
    return (_bytes(papers[names[0]]), _bytes(papers[names[1]])), _label(label)


def read_papers(path: Path) -> dict[bytes, bytes]:
    """Texts of papers by name, from lines of JSON."""
    papers = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            match _json(line):
                case {"id": str(name), "text": str(content)}:
                    papers[_encoded(name)] = _encoded(content)
                case _:
                    raise UserError(f"line {number} of {path} has no id and text of a paper")
    return papers


def _words(expression: str) -> Numbers:
    return np.array(listops.encode(expression), dtype=np.int64)


def _bytes(content: bytes) -> Numbers:
    if not content:
        raise UserError("its text is empty")
    return np.frombuffer(content, dtype=np.uint8).astype(np.int64) + 1


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise UserError("it is JSON that is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"it is not JSON: {error}") from error


def _encoded(content: str) -> bytes:
    """In UTF-8; unpaired surrogates, which JSON may contain, are replaced."""
    return content.encode(errors="replace")


def _columns(line: bytes, count: int) -> list[bytes]:
    columns = line.split(b"\t")
    if len(columns) != count:
        raise UserError(f"it has {len(columns)} columns, but {count} are expected")
    return columns


def _label(value: bytes) -> int:
    """0 or 1; the release may write 0.0 or 1.0."""
    if float(value) not in (0.0, 1.0):
        raise UserError(f"its class is {value.decode()}, but 0 or 1 is expected")
    return int(float(value))


def _checked_size(image: Image.Image) -> Image.Image:
    if image.size != (_SIDE, _SIDE):
        raise UserError(
            f"it has {image.width} x {image.height} pixels, but {_SIDE} x {_SIDE} are expected"
        )
    return image
