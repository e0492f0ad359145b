"""Labelled sequences of tokens by number: the five tasks of the Long Range Arena.

Choices are the benchmark's, as Nyströmformer's authors run it in PyTorch: token 0 is padding,
and there is no token for the start, the end or the class. Words and bytes count from 1. Grey
values do not: black pixels have the token 0 and are masked as padding is, there and here.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..errors import UserError, user_file
from . import listops
from .image_files import ImageFileError, load_numbers
from .paths import below, open_file, read_file, shown
from .scenes import listed
from .sources import Source, find_root, open_source

PAD = 0

Tokens = Tensor | tuple[Tensor, Tensor]
Numbers = NDArray[np.int64]
Row = tuple[tuple[Numbers, ...], int]
"""Tokens of one sequence or of a pair, and the class."""

_RELEASE = "https://storage.googleapis.com/long-range-arena/lra_release.gz"
_REVIEWS = "https://ai.stanford.edu/~amaas/data/sentiment/"
_IMAGES = "https://www.cs.toronto.edu/~kriz/cifar.html"
_PARTS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "eval", "evaluation", "dev"),
    "test": ("test",),
}
_LUMA = np.array([0.2989, 0.587, 0.114], dtype=np.float32)
_SIDE = 32
_LONGEST_EXPRESSION = 2**20
"""Bytes of a line of ListOps: the benchmark's have 20,000."""
_LONGEST_TEXT = 2**24
"""Bytes of a line or file of text."""


class Rows(ABC):
    """Where samples are read from."""

    classes: list[str] | None = None
    """Where the files tell them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> Row: ...

    @abstractmethod
    def describe(self, number: int) -> str: ...


class Sequences(Source):
    """Sequences of tokens, or pairs of them, by number.

    Args:
        task: What they are of.
        rows: Where they are read from.
        numbers: Those of the rows that count, in order.
        max_length: Tokens of a sequence; what is beyond them is cut off.
    """

    classes: list[str]

    def __init__(self, task: "Task", rows: Rows, numbers: Sequence[int], max_length: int) -> None:
        self.rows, self.numbers, self.max_length = rows, numbers, max_length
        self.classes = list(task.classes) or rows.classes or []
        self.vocabulary, self.pairs = task.vocabulary, task.pairs

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def __len__(self) -> int:
        return len(self.numbers)

    def load(self, index: int) -> tuple[Tokens, int]:  # type: ignore[override]
        """Tokens (n,) of int64, or those (n1,) and (n2,) of a pair, and the class."""
        sequences, label = self.rows.read(self.numbers[index])
        tokens = [torch.from_numpy(sequence[: self.max_length]) for sequence in sequences]
        return (tokens[0], tokens[1]) if self.pairs else tokens[0], label

    def describe(self, index: int) -> str:
        return self.rows.describe(self.numbers[index])


class Generated(Rows):
    """Expressions of ListOps, made when they are asked for; the same ones in all runs.

    Args:
        longest: Length that all are shorter than, for one that is cut has no value; they are
            longer than a quarter of it, as the benchmark's are of 500 to 2000.
    """

    def __init__(self, part: str, longest: int = 2000) -> None:
        self.part, self.longest = part, longest

    def __len__(self) -> int:
        return 96_000 if self.part == "train" else 2000

    def read(self, number: int) -> Row:
        bounds = self.longest // 4, self.longest
        expression, value = listops.generate(0, self.part, number, *bounds)
        return (_words(expression),), value

    def describe(self, number: int) -> str:
        return f"listops {self.part}[{number}]"


class Lines(Rows):
    """Lines of a file that stays on disk; only where they start is kept.

    Args:
        parse: Makes a sample of a line.
        header: What the first line must be, if it is not a sample.
        longest: Bytes that a line may have.
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

    def read(self, number: int) -> Row:
        with self.path.open("rb") as file:
            file.seek(self.starts[number])
            return self.parse(file.readline().rstrip(b"\r\n"))

    def describe(self, number: int) -> str:
        return f"{self.path}[{number}]"


class Files(Rows):
    """Files of one sample each.

    Args:
        names: Of files below the folder, and their classes.
        parse: Makes tokens of a file.
    """

    def __init__(
        self, folder: Path, names: list[tuple[str, int]], parse: Callable[[Path], Numbers]
    ) -> None:
        self.folder, self.names, self.parse = folder, names, parse

    def __len__(self) -> int:
        return len(self.names)

    def read(self, number: int) -> Row:
        name, label = self.names[number]
        return (self.parse(self.folder / name),), label

    def describe(self, number: int) -> str:
        return shown(self.folder / self.names[number][0])


class GreyImages(Rows):
    """Labelled images in colour, as the grey values of their pixels, row by row."""

    def __init__(self, source: Source) -> None:
        self.source, self.classes = source, source.classes

    def __len__(self) -> int:
        return len(self.source)

    def read(self, number: int) -> Row:
        image, label = self.source.load(number)
        return (grey(image),), label

    def describe(self, number: int) -> str:
        return self.source.describe(number)


def grey(image: Image.Image) -> Numbers:
    """Grey values 0 to 255 of an image in RGB, by the weights and the rounding of TensorFlow."""
    colours = np.asarray(_small(image), dtype=np.float32) * np.float32(1 / 255)
    return (colours @ _LUMA * np.float32(255.5)).astype(np.int64).flatten()


class Task(NamedTuple):
    open: Callable[[str | None, str], tuple[Rows, Sequence[int]]]
    """From root and part: rows, and those of them that count."""
    classes: Sequence[str]
    """None where the files tell them."""
    vocabulary: int
    """Tokens that there are, padding among them."""
    max_length: int
    origin: str
    pairs: bool = False


def open_sequences(
    name: str,
    root: str | None,
    split: str,
    max_length: int | None = None,
    count: int | None = None,
) -> Sequences:
    """A task of the Long Range Arena.

    Args:
        name: "listops", "text", "retrieval", "image" or "pathfinder".
        root: Its folder, as given or below $SOFTMAXFREE_DATA; without one listops are generated.
        split: "train", "val" or "test".
        max_length: Tokens of a sequence; the benchmark's if not given.
        count: Take only so many samples, the first of a fixed shuffle. Of generated listops there
            may be more than the benchmark's.
    """
    task, part = find_task(name), _find_part(name, split)
    for option, value in (("max_length", max_length), ("number of samples", count)):
        if value is not None and value < 1:
            raise UserError(f"the {option} of {name} is {value}: give 1 or more")
    try:
        rows, numbers = task.open(root, part)
    except UserError as error:
        raise UserError(f"{error}; the data of {name} come from {task.origin}") from error
    length = max_length or task.max_length
    if isinstance(rows, Generated):
        rows.longest = length
        numbers = range(count or len(rows))
    elif count is not None:
        if count > len(numbers):
            raise UserError(
                f"{name} has {len(numbers)} samples in its split {split!r}, fewer than the "
                f"{count} asked for: ask for {len(numbers)} at most"
            )
        numbers = [numbers[place] for place in _shuffled(len(numbers))[:count]]
    source = Sequences(task, rows, numbers, length)
    if not len(source):
        raise UserError(f"{name} has no samples in its split {split!r}: check {root}")
    try:
        # A file that cannot be read is reported when its turn comes.
        with suppress(OSError, ImageFileError):
            source.load(0)
    except ValueError as error:
        raise UserError(f"{source.describe(0)} cannot be read: {error}") from error
    return source


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise UserError(f"there is no task of sequences {name!r}: take one of {listed(TASKS)}")
    return TASKS[name]


def _open_listops(root: str | None, part: str) -> tuple[Rows, Sequence[int]]:
    """Expressions without parentheses; those of the release, or new ones made like them."""
    if root is None:
        rows: Rows = Generated(part)
    else:
        file = _find(root, "lra_release/listops-1000", f"basic_{part}.tsv")
        rows = Lines(file, _expression, listops.HEADER, _LONGEST_EXPRESSION)
    return rows, range(len(rows))


def _open_text(root: str | None, part: str) -> tuple[Rows, Sequence[int]]:
    """Bytes of IMDb's reviews; as in the benchmark, validation scores the test part."""
    part = "train" if part == "train" else "test"
    folder = Path(find_root(root))
    if (folder / f"{part}.jsonl").is_file():
        rows: Rows = Lines(folder / f"{part}.jsonl", _review)
    else:
        try:
            folder = _find(root, "aclImdb", part)
        except UserError as error:
            raise UserError(f"{error}, nor {part}.jsonl") from error
        names = [
            (str(path.relative_to(folder)), label)
            for label, kind in enumerate(("neg", "pos"))
            for path in sorted(folder.glob(f"{kind}/*.txt"))
        ]
        rows = Files(folder, names, _text)
    return rows, range(len(rows))


def _open_retrieval(root: str | None, part: str) -> tuple[Rows, Sequence[int]]:
    """Bytes of two papers of the ACL anthology, of which the first cites the second or not."""
    part = "eval" if part == "val" else part
    folder = Path(find_root(root))
    if (folder / "papers.jsonl").is_file():
        papers = _read_papers(folder / "papers.jsonl")
        rows = Lines(_find(root, "", f"pairs.{part}.tsv"), partial(_cited, papers))
    else:
        rows = Lines(_find(root, "lra_release/tsv_data", f"new_aan_pairs.{part}.tsv"), _pair)
    return rows, range(len(rows))


def _open_image(root: str | None, part: str) -> tuple[Rows, Sequence[int]]:
    """CIFAR-10 in grey; a tenth of its training images is for validation.

    In the benchmark that is the last tenth in the order of TensorFlow Datasets, here in that of
    a fixed shuffle.
    """
    files = "torch/cifar10" if (Path(find_root(root)) / "cifar-10-batches-py").is_dir() else ""
    source = open_source(files, root, "test" if part == "test" else "train")
    assert isinstance(source, Source)
    rows = GreyImages(source)
    return rows, range(len(rows)) if part == "test" else _share(len(rows), part, 0.9, 1.0)


def _open_pathfinder(root: str | None, part: str) -> tuple[Rows, Sequence[int]]:
    """The hardest of the 32 x 32 pixels: contours of 14 pieces.

    The benchmark, too, shuffles them before it takes 80, 10 and 10 per cent; its order is not
    known.
    """
    metadata = _find(root, "lra_release/pathfinder32/curv_contour_length_14", "metadata")
    names = []
    for path in sorted(metadata.glob("*.npy")):  # which are text
        for line in path.read_text().splitlines():
            folder, name, _, label, *_ = [*line.split(), "", "", "", ""]
            if label not in ("0", "1"):
                raise UserError(
                    f"{path} has the line {line!r}, which does not start with a folder, a file, "
                    "a number and a class of 0 or 1"
                )
            below(metadata.parent, f"{folder}/{name}")
            names.append((f"{folder}/{name}", int(label)))
    rows = Files(metadata.parent, names, _contours)
    return rows, _share(len(rows), part, 0.8, 0.9)


TASKS = {
    "listops": Task(_open_listops, "0123456789", 1 + len(listops.WORDS), 2000, _RELEASE),
    "text": Task(_open_text, ["negative", "positive"], 257, 4000, _REVIEWS),
    "retrieval": Task(_open_retrieval, ["not cited", "cited"], 257, 4000, _RELEASE, pairs=True),
    "image": Task(_open_image, [], 256, 1024, _IMAGES),
    "pathfinder": Task(_open_pathfinder, ["apart", "connected"], 256, 1024, _RELEASE),
}


def _find_part(name: str, split: str) -> str:
    part = next((part for part, names in _PARTS.items() if split in names), None)
    if part is None:
        raise UserError(f"{name} has no split {split!r}: take one of {listed(_PARTS)}")
    return part


def _find(root: str | None, inner: str, name: str) -> Path:
    """A file or folder in root, or deeper in the folders that the official archive has."""
    base, parts = Path(find_root(root)), Path(inner).parts
    places = [base.joinpath(*parts[depth:], name) for depth in range(len(parts), -1, -1)]
    for path in places:
        if path.exists():
            return path
    official = f", nor {'/'.join(parts)}/{name}" if parts else ""
    raise UserError(f"{base} has no {name}{official}")


def _shuffled(count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


def _share(count: int, part: str, train: float, val: float) -> list[int]:
    """Numbers of a part, which ends at that fraction of a fixed shuffle."""
    ends = {"train": (0.0, train), "val": (train, val), "test": (val, 1.0)}[part]
    start, end = (int(count * fraction) for fraction in ends)
    return _shuffled(count)[start:end]


def _words(expression: str) -> Numbers:
    return np.array(listops.encode(expression), dtype=np.int64)


def _bytes(text: bytes) -> Numbers:
    if not text:
        raise UserError("its text is empty")
    return np.frombuffer(text, dtype=np.uint8).astype(np.int64) + 1


def _expression(line: bytes) -> Row:
    expression, value = listops.read_row(line.decode())
    return (_words(expression),), value


def _review(line: bytes) -> Row:
    match _json(line):
        case {"text": str(text), "label": 0 | 1 as label}:
            return (_bytes(_encoded(text)),), int(label)
    raise UserError("it is not a JSON object with a text and a label of 0 or 1")


def _text(path: Path) -> Numbers:
    return _bytes(read_file(path, _LONGEST_TEXT))


def _read_papers(path: Path) -> dict[bytes, bytes]:
    papers = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            match _json(line):
                case {"id": str(name), "text": str(text)}:
                    papers[_encoded(name)] = _encoded(text)
                case _:
                    raise UserError(f"line {number} of {path} has no id and text of a paper")
    return papers


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise UserError("it is JSON that is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"it is no JSON: {error}") from error


def _encoded(text: str) -> bytes:
    """In UTF-8; halves of characters, which JSON may have, are replaced."""
    return text.encode(errors="replace")


def _cited(papers: dict[bytes, bytes], line: bytes) -> Row:
    """Class, and the papers by their names."""
    label, *names = _columns(line, 3)
    if unknown := next((name for name in names if name not in papers), None):
        raise UserError(f"there is no paper {unknown.decode()} in papers.jsonl")
    return (_bytes(papers[names[0]]), _bytes(papers[names[1]])), _label(label)


def _pair(line: bytes) -> Row:
    """Class, names of the papers, and their texts."""
    label, _, _, first, second = _columns(line, 5)
    return (_bytes(first), _bytes(second)), _label(label)


def _columns(line: bytes, count: int) -> list[bytes]:
    columns = line.split(b"\t")
    if len(columns) != count:
        raise UserError(f"it has {len(columns)} columns, but {count} are expected")
    return columns


def _label(text: bytes) -> int:
    """0 or 1, which the release may write as 0.0 or 1.0."""
    if float(text) not in (0.0, 1.0):
        raise UserError(f"its class is {text.decode()}, but 0 or 1 is expected")
    return int(float(text))


def _contours(path: Path) -> Numbers:
    return np.asarray(_small(load_numbers(path)).convert("L"), dtype=np.int64).flatten()


def _small(image: Image.Image) -> Image.Image:
    if image.size != (_SIDE, _SIDE):
        raise UserError(
            f"it has {image.width} x {image.height} pixels, but {_SIDE} x {_SIDE} are expected"
        )
    return image
