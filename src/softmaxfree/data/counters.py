"""Randomness as a function of counters, so that a resumed run is bit-identical."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_WORD = 2**64 - 1


def hash_counters(*counters: int) -> int:
    """A 64-bit hash of the counters (splitmix64, one round for each)."""
    state = 0
    for counter in counters:
        state = (state ^ (counter & _WORD)) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


def seed_sample(*counters: int) -> None:
    """Seeds the generators of Python, numpy and torch on the CPU."""
    seed = hash_counters(*counters)
    random.seed(seed)
    np.random.seed(seed >> 32)
    torch.default_generator.manual_seed(seed)


def seed_step(*counters: int) -> None:
    """Seeds the generators of Python, numpy and torch on all devices."""
    seed_sample(*counters)
    torch.manual_seed(hash_counters(*counters))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores the generators of Python, numpy and torch on the CPU afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
