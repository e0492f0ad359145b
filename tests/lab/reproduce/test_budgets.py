"""Contestants of one budget cost the same."""

import pytest

from softmaxfree.lab.reproduce.contestants import Budget
from softmaxfree.lab.reproduce.softx import CIFAR10, TINY_IMAGENET
from softmaxfree.models.cost import cost


@pytest.mark.parametrize("budget", [CIFAR10, TINY_IMAGENET], ids=lambda budget: budget.name)
def test_contestants_cost_the_same(budget: Budget) -> None:
    costs = {
        name: cost(contestant.build(budget.classes), 3, budget.side, budget.side).multiply_adds
        for name, contestant in budget.contestants.items()
    }
    assert max(costs.values()) < 1.02 * min(costs.values()), costs
