"""Randomness as a function of counters, so that a run resumed in the middle is the same run."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def _seeds(counters: tuple[int, ...]) -> list[int]:
    return [int(word) for word in np.random.SeedSequence(counters).generate_state(3)]


def seed_step(*counters: int) -> None:
    """Seeds Python, numpy and torch on all devices, for what follows."""
    python, array, tensor = _seeds(counters)
    random.seed(python)
    np.random.seed(array)
    torch.manual_seed(tensor)


@contextmanager
def seeded(*counters: int) -> Iterator[None]:
    """Seeds Python, numpy and torch on the CPU, and leaves them as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    python, array, tensor = _seeds(counters)
    random.seed(python)
    np.random.seed(array)
    torch.default_generator.manual_seed(tensor)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
