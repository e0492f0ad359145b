"""Loaders that divide data between processes, know their position and time how long they take."""

import atexit
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, DistributedSampler

from ..errors import UserError, visible
from .samples import NOTHING, SampleStream

_log = logging.getLogger(__name__)


class ShardedSampler(DistributedSampler[Any]):
    """Pairs (epoch, index) for one of several processes.

    In training the order is a function of (seed, epoch), and an incomplete last batch is dropped.
    The b-th batches of all processes together hold the same samples for any number of processes. In
    evaluation every sample comes exactly once; padding (-1) makes the shares equal.

    Args:
        length: Number of samples.
        whole: Samples of a batch over all processes; 0 in evaluation, to keep an incomplete one.
    """

    def __init__(
        self, length: int, seed: int, shuffle: bool, whole: int, rank: int, replicas: int
    ) -> None:
        super().__init__(
            range(length),  # type: ignore[arg-type]
            num_replicas=replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=whole > 0,
        )
        if whole:
            self.total_size = length // whole * whole
        self.num_samples = self.total_size // replicas
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        length = len(self.dataset)  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(length, generator=generator)
        else:
            order = torch.arange(length)
        padding = torch.full((max(self.total_size - length, 0),), NOTHING)
        order = torch.cat([order[: self.total_size], padding])
        share = order[self.rank :: self.num_replicas][self.start :]
        for index in share.tolist():
            yield self.epoch, index


def prepare_worker(worker: int) -> None:
    """Lowers the priority of a worker, and lets it ignore signals that training handles.

    A scheduler signals all processes of a job, but training needs its workers to finish the step. A
    second SIGTERM, which torch sends to a worker that does not stop, ends the worker.
    """
    os.nice(5)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    asked = itertools.count()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if next(asked) else None)


_with_workers: WeakSet[Any] = WeakSet()


@atexit.register
def end_workers() -> None:
    """Ends the workers of loaders that a traceback keeps: Python would send SIGTERM, and wait."""
    for batches in _with_workers:
        batches._shutdown_workers()


class ResumableLoader(DataLoader[Any]):
    """A loader that resumes in the middle of an epoch, with any number of workers.

    Its state is one number, the batches given out in this epoch: seed, epoch and index determine
    every batch. torchdata's StatefulDataLoader would instead store a state for each worker and bind
    a checkpoint to their number.

    Args:
        epoch: Returns the current epoch; called when the epoch's first batch is requested.
        check: Raises UserError for a batch that training cannot use.
        arguments: Arguments of torch's DataLoader.
    """

    position: int
    """Batches given out in this epoch."""
    waited: float
    """Seconds spent waiting for batches, in total."""
    broken: dict[str, str]
    """Files that could not be read, and why."""

    def __init__(
        self,
        *arguments: Any,
        epoch: Callable[[], int] = lambda: 0,
        check: Callable[[Any, "ResumableLoader"], None] = lambda batch, loader: None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named, generator=torch.Generator())  # type: ignore[misc]
        self.epoch, self.check = epoch, check
        self.position, self.resume_at = 0, 0
        self.waited, self.broken = 0.0, {}

    def _get_iterator(self) -> Any:
        batches = super()._get_iterator()
        if self.num_workers:
            _with_workers.add(batches)
        return batches

    def __iter__(self) -> Any:
        """Starts when the first batch is requested: only then is the epoch known."""
        skip, self.resume_at = self.resume_at, 0
        self.position = skip
        epoch = self.epoch()
        self.generator.manual_seed(epoch)  # seeds the workers, which shuffle streams
        stream = isinstance(self.dataset, SampleStream)
        if stream:
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        elif isinstance(self.sampler, ShardedSampler):
            self.sampler.set_epoch(epoch)
            self.sampler.start = skip * (self.batch_size or 1)
        batches = super().__iter__()
        for _ in range(skip if stream else 0):
            next(batches, None)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - started
            if batch is None:
                return
            self.position += 1
            self._report(batch)
            self.check(batch, self)
            yield batch

    def _report(self, batch: Any) -> None:
        for path, reason in batch.broken:
            if path not in self.broken:
                self.broken[path] = reason
                _log.warning("skipped %s, which cannot be read: %s", visible(path), visible(reason))

    def refuse_missing(self, missing: bool) -> None:
        """Raises UserError if a training sample and its neighbours are unreadable."""
        if self.drop_last and missing:
            raise UserError(
                f"{len(self.broken)} samples cannot be read, among them 20 in a row "
                f"({next(iter(self.broken), 'of no class')} is the first): check the data set"
            )

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        whole = len(self)
        self.resume_at = state["position"] if state["position"] < whole else 0
