"""Whether a difference between runs is more than what seeds make."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.stats import t as student

CONFIDENCE = 0.95
VERDICTS = ("held", "not held", "cannot tell")


class Verdict(NamedTuple):
    """Of the claim that one contestant scores higher than another."""

    difference: float
    """Of the means."""
    smallest: float
    """The smallest difference that these runs could have shown."""

    @property
    def word(self) -> str:
        if abs(self.difference) < self.smallest:
            return "cannot tell"
        return "held" if self.difference > 0 else "not held"


def spread(scores: Mapping[str, Sequence[float]]) -> tuple[float, int]:
    """Standard deviation over the seeds of a contestant, pooled over all; degrees of freedom."""
    several = [values for values in scores.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    if not freedom:
        return math.inf, 0
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in several)
    return math.sqrt(squares / freedom), freedom


def judge(
    scores: Mapping[str, Sequence[float]],
    higher: str,
    lower: str,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """By Student's t, two-sided, with the spread of all contestants of an experiment.

    Args:
        scores: Of each contestant, one for each seed.
        higher, lower: The two that are compared.
        confidence: 1 less the probability of a verdict where there is no difference.
    """
    deviation, freedom = spread(scores)
    one, other = scores[higher], scores[lower]
    if not freedom:
        smallest = math.inf
    else:
        quantile = float(student.ppf((1 + confidence) / 2, freedom))
        smallest = quantile * deviation * math.sqrt(1 / len(one) + 1 / len(other))
    return Verdict(statistics.fmean(one) - statistics.fmean(other), smallest)
