"""Labelled sequences of tokens as a Lightning data module."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from .base import SplitData
from .samples import NOTHING, Sample, numbers_and_broken
from .sequences import PAD, find_task, open_sequences
from .sources import Source


class SequenceBatch(NamedTuple):
    tokens: Tensor
    """(B, n) of int64, with 0 after the end of a sequence."""
    mask: Tensor
    """(B, n) of bool, False for padding, which is 0."""
    second_tokens: Tensor | None
    """(B, m), the second sequences of pairs."""
    second_mask: Tensor | None
    targets: Tensor
    """(B), -1 for missing samples."""
    indices: Tensor
    """(B), numbers of the samples in their data set."""
    broken: tuple[tuple[str, str], ...]

    @property
    def incomplete(self) -> bool:
        return bool((self.targets == NOTHING).any())


class SequenceData(SplitData):
    """The tasks of the Long Range Arena.

    Args:
        name: listops (nested lists of digits, generated if no root is given), text (bytes of IMDb's
            reviews), retrieval (bytes of pairs of papers), image (grey pixels of CIFAR-10) or
            pathfinder (pixels of contours).
        root: The folder of the data, as given or below $SOFTMAXFREE_DATA.
        train_split: The part to train on.
        val_split: The part that validation scores; for text always the test part, as in the
            benchmark.
        test_split: The part that `test` scores.
        max_length: Longest sequence, in tokens; longer ones are truncated. If not given, the
            benchmark's: 2000 for listops, 4000 for text and retrieval, 1024 for image and
            pathfinder. Generated listops are shorter than this and longer than a quarter of it.
        pad_to: Length that sequences are padded to, such as the benchmark's 2048 and 4096; the
            longest of the batch if not given.
        train_samples: Number of training samples, the first of a fixed shuffle; generated listops
            may be more than the benchmark's 96,000.
        val_samples: Number of validation samples, chosen in the same way.
        batch_size: Samples a step, over all processes and all accumulated batches.
        eval_batch_size: Samples a process scores at a time; its share of batch_size if not given.
        num_workers: Processes that load samples, for each process that trains.
        seed: The order is a function of (seed, epoch); generated samples do not depend on it.
    """

    def __init__(
        self,
        name: str = "listops",
        root: str | None = None,
        train_split: str = "train",
        val_split: str = "val",
        test_split: str = "test",
        max_length: int | None = None,
        pad_to: int | None = None,
        train_samples: int | None = None,
        val_samples: int | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        seed: int = 0,
    ) -> None:
        splits = {"train": train_split, "val": val_split, "test": test_split}
        super().__init__(splits, batch_size, eval_batch_size, num_workers, seed)
        task = find_task(name)
        self.dataset, self.root = name, root
        self.counts = {"train": train_samples, "val": val_samples, "test": None}
        self.max_length = task.max_length if max_length is None else max_length
        self.longest = pad_to or self.max_length
        self.vocabulary, self.pairs = task.vocabulary, task.pairs
        if pad_to is not None and pad_to < self.max_length:
            raise UserError(
                f"sequences of up to {self.max_length} tokens cannot be padded to {pad_to}: give "
                f"--data.pad_to {self.max_length} or more, or a smaller --data.max_length"
            )
        self.collate = partial(collate_sequences, pad_to=pad_to)
        one = torch.ones(1, dtype=torch.int64)  # any token: attention needs at least one
        self.nothing = (one, one) if task.pairs else one, NOTHING

    def open(self, part: str) -> Source:
        return open_sequences(
            self.dataset, self.root, self.splits[part], self.max_length, self.counts[part]
        )

    def prepare(self, training: bool) -> Any:
        return _as_it_is


def collate_sequences(samples: list[Sample], pad_to: int | None = None) -> SequenceBatch:
    """Makes a batch of sequences, padded to the longest or to a given length."""
    sequences: list[Any] = [sample.image for sample in samples]
    second: tuple[Tensor | None, Tensor | None] = None, None
    if isinstance(sequences[0], tuple):
        sequences, others = (list(part) for part in zip(*sequences))
        second = _padded(others, pad_to)
    return SequenceBatch(
        *_padded(sequences, pad_to),
        *second,
        torch.tensor([sample.target for sample in samples]),
        *numbers_and_broken(samples),
    )


def _padded(sequences: Sequence[Tensor], pad_to: int | None) -> tuple[Tensor, Tensor]:
    """Tokens and mask, (B, n) each."""
    length = pad_to or max(map(len, sequences))
    tokens = torch.full((len(sequences), length), PAD)
    for row, sequence in zip(tokens, sequences):
        row[: len(sequence)] = sequence
    return tokens, tokens != PAD


def _as_it_is(tokens: Any, label: int) -> tuple[Any, int]:
    return tokens, label
