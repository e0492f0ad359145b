"""Labelled sequences of tokens: the five tasks of the Long Range Arena.

Details follow the PyTorch benchmark by Nyströmformer's authors: there is no token for the start,
the end or the class.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from . import listops, sequence_files
from .image_files import ImageFileError
from .paths import below
from .roots import find_root
from .scenes import listed
from .sequence_files import Files, GeneratedExpressions, GreyImages, Lines
from .sources import Source, View, open_source

PAD = 0

Tokens = Tensor | tuple[Tensor, Tensor]
Samples = tuple[Source, Sequence[int]]
"""Where samples are read from, and the numbers of those in a split."""

_RELEASE = "https://storage.googleapis.com/long-range-arena/lra_release.gz"
_REVIEWS = "https://ai.stanford.edu/~amaas/data/sentiment/"
_IMAGES = "https://www.cs.toronto.edu/~kriz/cifar.html"
_PARTS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "eval", "evaluation", "dev"),
    "test": ("test",),
}


class Sequences(View):
    """Sequences of tokens, or pairs of them.

    Args:
        rows: Where they are read from.
        numbers: Numbers of the rows in this split, in order.
        max_length: Longest sequence, in tokens; longer ones are truncated.
    """

    classes: list[str]

    def __init__(self, task: "Task", rows: Source, numbers: Sequence[int], max_length: int) -> None:
        super().__init__(rows, numbers)
        self.max_length = max_length
        self.classes = list(task.classes) or rows.classes or []
        self.vocabulary, self.pairs = task.vocabulary, task.pairs

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def load(self, index: int) -> tuple[Tokens, int]:
        """Tokens (n,) of int64, or (n1,) and (n2,) of a pair, and the class."""
        sequences, label = super().load(index)
        tokens = [torch.from_numpy(sequence[: self.max_length]) for sequence in sequences]
        return (tokens[0], tokens[1]) if self.pairs else tokens[0], label


class Task(NamedTuple):
    open: Callable[[str | None, str], Samples]
    """Opens a part of the data below a root."""
    classes: Sequence[str]
    """Empty if the data set names them."""
    vocabulary: int
    """Number of tokens, including padding."""
    max_length: int
    origin: str
    """Where the data can be downloaded."""
    pairs: bool = False


def open_sequences(
    name: str,
    root: str | None,
    split: str,
    max_length: int | None = None,
    count: int | None = None,
) -> Sequences:
    """Opens a task of the Long Range Arena.

    Args:
        name: "listops", "text", "retrieval", "image" or "pathfinder".
        root: Its folder, as given or below $SOFTMAXFREE_DATA; without it, listops are generated.
        split: "train", "val" or "test".
        max_length: Longest sequence, in tokens; the benchmark's if not given.
        count: Use only this many samples, the first of a fixed shuffle. Generated listops may be
            more than the benchmark's.
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
    if isinstance(rows, GeneratedExpressions):
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
        with suppress(OSError, ImageFileError):  # unreadable files are reported in training
            source.load(0)
    except ValueError as error:
        raise UserError(f"{source.describe(0)} cannot be read: {error}") from error
    return source


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise UserError(f"there is no task of sequences {name!r}: take one of {listed(TASKS)}")
    return TASKS[name]


def _open_listops(root: str | None, part: str) -> Samples:
    """Expressions of the release without parentheses, or new ones generated like them."""
    if root is None:
        return _all(GeneratedExpressions(part))
    file = _find(root, "lra_release/listops-1000", f"basic_{part}.tsv")
    longest = sequence_files.LONGEST_EXPRESSION
    return _all(Lines(file, sequence_files.expression, listops.HEADER, longest))


def _open_text(root: str | None, part: str) -> Samples:
    """Bytes of IMDb's reviews. As in the benchmark, validation uses the test part."""
    part = "train" if part == "train" else "test"
    folder = Path(find_root(root))
    if (folder / f"{part}.jsonl").is_file():
        return _all(Lines(folder / f"{part}.jsonl", sequence_files.review))
    try:
        folder = _find(root, "aclImdb", part)
    except UserError as error:
        raise UserError(f"{error}, nor {part}.jsonl") from error
    names = [
        (str(path.relative_to(folder)), label)
        for label, kind in enumerate(("neg", "pos"))
        for path in sorted(folder.glob(f"{kind}/*.txt"))
    ]
    return _all(Files(folder, names, sequence_files.text))


def _open_retrieval(root: str | None, part: str) -> Samples:
    """Bytes of two papers of the ACL anthology: does the first cite the second?"""
    part = "eval" if part == "val" else part
    papers = Path(find_root(root)) / "papers.jsonl"
    if papers.is_file():
        parse = partial(sequence_files.named_pair, sequence_files.read_papers(papers))
        return _all(Lines(_find(root, "", f"pairs.{part}.tsv"), parse))
    file = _find(root, "lra_release/tsv_data", f"new_aan_pairs.{part}.tsv")
    return _all(Lines(file, sequence_files.pair))


def _open_image(root: str | None, part: str) -> Samples:
    """CIFAR-10 in grey; a tenth of the training images is for validation.

    The benchmark takes the last tenth in the order of TensorFlow Datasets, this function that of a
    fixed shuffle.
    """
    files = "torch/cifar10" if (Path(find_root(root)) / "cifar-10-batches-py").is_dir() else ""
    source = open_source(files, root, "test" if part == "test" else "train")
    assert isinstance(source, Source)
    rows = GreyImages(source)
    return _all(rows) if part == "test" else (rows, _share(len(rows), part, 0.9, 1.0))


def _open_pathfinder(root: str | None, part: str) -> Samples:
    """The hardest contours of 32 x 32 pixels, with 14 pieces.

    The benchmark also shuffles them before it takes 80, 10 and 10 per cent; its order is unknown.
    """
    metadata = _find(root, "lra_release/pathfinder32/curv_contour_length_14", "metadata")
    names = []
    for path in sorted(metadata.glob("*.npy")):  # text, despite the suffix
        for line in path.read_text().splitlines():
            folder, name, _, label, *_ = [*line.split(), "", "", "", ""]
            if label not in ("0", "1"):
                raise UserError(
                    f"{path} has the line {line!r}, which does not start with a folder, a file, "
                    "a number and a class of 0 or 1"
                )
            below(metadata.parent, f"{folder}/{name}")
            names.append((f"{folder}/{name}", int(label)))
    return Files(metadata.parent, names, sequence_files.contours), _share(
        len(names), part, 0.8, 0.9
    )


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
    """A file or folder in root, or in the folders of the official archive below it."""
    base, parts = Path(find_root(root)), Path(inner).parts
    places = [base.joinpath(*parts[depth:], name) for depth in range(len(parts), -1, -1)]
    for path in places:
        if path.exists():
            return path
    official = f", nor {'/'.join(parts)}/{name}" if parts else ""
    raise UserError(f"{base} has no {name}{official}")


def _all(rows: Source) -> Samples:
    return rows, range(len(rows))


def _shuffled(count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


def _share(count: int, part: str, train: float, val: float) -> list[int]:
    """Numbers of a part of a fixed shuffle; train and val are the fractions where these end."""
    ends = {"train": (0.0, train), "val": (train, val), "test": (val, 1.0)}[part]
    start, end = (int(count * fraction) for fraction in ends)
    return _shuffled(count)[start:end]
