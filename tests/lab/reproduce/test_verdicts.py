"""Verdicts on claims: known scores in, known words out."""

import math

import pytest
from scipy.stats import ttest_ind

from softmaxfree.lab.reproduce.verdicts import judge, spread


def test_the_spread_is_pooled_over_contestants() -> None:
    deviation, freedom = spread({"a": [1.0, 3.0], "b": [10.0, 10.0, 13.0], "c": [5.0]})
    assert freedom == 3
    assert deviation == pytest.approx(math.sqrt((2 + 6) / 3))


def test_two_contestants_are_judged_as_by_students_test() -> None:
    one, other = [61.0, 62.0, 63.5], [58.0, 60.5, 59.0]
    verdict = judge({"a": one, "b": other}, "a", "b")
    assert verdict.difference == pytest.approx(3.0)
    assert (verdict.word == "held") == (ttest_ind(one, other).pvalue < 0.05)
    interval = ttest_ind(one, other).confidence_interval(0.95)
    assert verdict.smallest == pytest.approx((interval.high - interval.low) / 2)


def test_words() -> None:
    scores = {"high": [70.0, 70.2, 70.1], "low": [60.0, 60.2, 60.1], "near": [70.0, 70.3, 70.1]}
    assert judge(scores, "high", "low").word == "held"
    assert judge(scores, "low", "high").word == "not held"
    assert judge(scores, "near", "high").word == "cannot tell"
    assert judge({"a": [1.0], "b": [2.0]}, "a", "b").word == "cannot tell"  # one seed shows nothing
