"""Training: the optimiser's formula, the schedule's and the average's ends, a step that learns."""

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from softmaxfree_mindspore.train import (
    RECIPE,
    AdamW,
    Average,
    kept_average,
    learning_rate,
    read_recipe,
    training_step,
)


def test_adamw_is_its_formula() -> None:
    """Decoupled decay for the matrix and none for the bias, bias of both moments corrected."""
    model, rng = nn.Dense(3, 2), np.random.RandomState(0)
    optimizer = AdamW(model, weight_decay=0.1)
    values = [p.asnumpy().astype(np.float64) for p in optimizer.parameters]
    first, second = ([np.zeros_like(v) for v in values] for _ in range(2))
    for step in range(1, 4):
        lr = 0.01 / step
        gradients = [rng.standard_normal(v.shape) for v in values]
        for i, g in enumerate(gradients):
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g**2
            update = first[i] / (1 - 0.9**step) / (np.sqrt(second[i] / (1 - 0.999**step)) + 1e-8)
            values[i] -= lr * (update + (0.1 if values[i].ndim > 1 else 0.0) * values[i])
        given = tuple(Tensor(g.astype(np.float32)) for g in gradients)
        optimizer(given, Tensor(lr, ms.float32), Tensor(step, ms.float32))
    for parameter, value in zip(optimizer.parameters, values):
        np.testing.assert_allclose(parameter.asnumpy(), value, atol=1e-6)


def test_the_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, steps=100, rising=10, lr=1.0) for step in range(101)]
    assert rates[0] == 1e-6
    assert rates[10] == pytest.approx(0.5 * (1 + math.cos(math.pi / 10)), abs=1e-5)
    assert rates[100] == pytest.approx(1e-5)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_the_average_begins_with_the_weights_and_follows_them() -> None:
    model = nn.Dense(3, 2)
    average = Average(model, decay=0.9)
    model.weight.set_data(model.weight + 1)
    moved = model.weight.asnumpy()
    average.update()
    model.weight.set_data(model.weight + 1)
    average.update()
    average.load()
    np.testing.assert_allclose(model.weight.asnumpy(), moved + (1 - kept_average(1, 0.9)), 1e-6)


def test_a_step_learns() -> None:
    ms.set_seed(0)
    model = nn.Dense(4, 10)
    step = training_step(model, AdamW(model, 0.0), read_recipe(RECIPE))
    images = Tensor(np.random.RandomState(0).standard_normal((8, 4)).astype(np.float32))
    targets, rate = Tensor(np.arange(8), ms.int32), Tensor(0.1, ms.float32)
    numbers = (Tensor(number, ms.float32) for number in (1, 2, 3))
    losses = [float(step(images, targets, rate, number).asnumpy()) for number in numbers]
    assert losses == sorted(losses, reverse=True)
