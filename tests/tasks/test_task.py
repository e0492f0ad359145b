"""Optimiser, schedule, averages, freezing: what every task shares."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from softmaxfree.data import ImageData
from softmaxfree.tasks import Classification
from softmaxfree.tasks.ema import MovingAverage

NANO: dict[str, Any] = {
    "num_classes": 10,
    "options": {"embed_dims": (16, 16, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)},
}


class Recorder(Callback):
    """Learning rates and weights after every step."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        self.weights.append({n: t.clone() for n, t in pl_module.model.state_dict().items()})


def train(
    task: Classification,
    tmp_path: Path,
    steps: int = 4,
    epochs: int = 1,
    ckpt_path: Path | None = None,
) -> Recorder:
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, limit_train_batches=steps, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[recorder], default_root_dir=tmp_path,
        use_distributed_sampler=False,
    )  # fmt: skip
    data = ImageData(size=16, batch_size=16, num_workers=0)
    trainer.fit(task, datamodule=data, ckpt_path=ckpt_path)
    return recorder


def test_the_learning_rate_warms_up_linearly_and_falls_as_a_cosine(tmp_path: Path) -> None:
    task = Classification(**NANO, lr=1e-2, warmup_epochs=1, warmup_lr=1e-4, min_lr=1e-3)
    rates = [rates[0] for rates in train(task, tmp_path, steps=4, epochs=5).rates]
    assert rates[:4] == pytest.approx([1e-4 + (1e-2 - 1e-4) * step / 4 for step in (1, 2, 3)] + [
        1e-3 + (1e-2 - 1e-3) * (1 + math.cos(math.pi * 4 / 20)) / 2
    ])  # fmt: skip
    later = [1e-3 + (1e-2 - 1e-3) * (1 + math.cos(math.pi * t / 20)) / 2 for t in range(5, 20)]
    assert rates[4:19] == pytest.approx(later)


def test_the_learning_rate_falls_at_milestones(tmp_path: Path) -> None:
    task = Classification(
        **NANO, lr=1e-2, warmup_epochs=0.5, warmup_lr=1e-4, schedule="step", milestones=[2, 3]
    )
    rates = [rates[0] for rates in train(task, tmp_path, steps=4, epochs=4).rates]
    warming = [1e-4 + (1e-2 - 1e-4) / 2]  # after one of two steps
    assert rates[:-1] == pytest.approx(warming + [1e-2] * 6 + [1e-3] * 4 + [1e-4] * 4)


def test_the_learning_rate_falls_linearly(tmp_path: Path) -> None:
    task = Classification(**NANO, lr=1e-2, schedule="poly", min_lr=0.0)
    rates = [rates[0] for rates in train(task, tmp_path, steps=4, epochs=2).rates]
    assert rates[:-1] == pytest.approx([1e-2 * (1 - step / 8) for step in range(1, 8)])


def test_one_cycle_is_torchs(tmp_path: Path) -> None:
    """Linear to the peak and down again, from a 25th and to a 250,000th of it."""
    rising = {"warmup_steps": 3, "warmup_lr": 4e-4, "min_lr": 4e-8}
    task = Classification(**NANO, lr=1e-2, schedule="one_cycle", **rising)
    rates = [rates[0] for rates in train(task, tmp_path, steps=4, epochs=3).rates]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, 13, pct_start=4 / 13, anneal_strategy="linear", cycle_momentum=False
    )
    expected = []
    for _ in range(11):
        optimizer.step()
        cycle.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates[:-1] == pytest.approx(expected)


def test_milestones_belong_to_steps() -> None:
    with pytest.raises(ValueError, match=r"got schedule: cosine with milestones: \[8.0\]"):
        Classification(**NANO, milestones=[8.0])
    with pytest.raises(ValueError, match="got schedule: step with milestones: None"):
        Classification(**NANO, schedule="step")


def test_biases_norms_and_embeddings_are_not_decayed(tmp_path: Path) -> None:
    task = Classification(**NANO, weight_decay=0.05)
    train(task, tmp_path, steps=1)
    groups = task.trainer.optimizers[0].param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in task.model.named_parameters():
        embedding = "position" in name or "cls_token" in name
        assert (id(parameter) in decayed) == (parameter.ndim > 1 and not embedding), name


def test_layers_near_the_image_learn_more_slowly(tmp_path: Path) -> None:
    task = Classification(**NANO, lr=1e-2, layer_decay=0.5)
    train(task, tmp_path, steps=1)
    rate = {
        id(parameter): group["lr"]
        for group in task.trainer.optimizers[0].param_groups
        for parameter in group["params"]
    }
    first = rate[id(next(task.model.stages[0].parameters()))]  # type: ignore[index,union-attr]
    head = rate[id(task.model.head.weight)]  # type: ignore[union-attr]
    assert first < head / 10


def test_the_average_is_what_the_formula_says(tmp_path: Path) -> None:
    task = Classification(**NANO, ema=0.5, mixup=0.8)
    steps = train(task, tmp_path, steps=6).weights
    expected = steps[0]
    for count, weights in enumerate(steps[1:], start=1):
        keep = min(0.5, (1 + count) / (10 + count))
        expected = {
            name: keep * tensor + (1 - keep) * weights[name]
            if tensor.is_floating_point()
            else weights[name]
            for name, tensor in expected.items()
        }
    for name, tensor in task.model.state_dict().items():  # in place once training has ended
        torch.testing.assert_close(tensor, expected[name])
    with pytest.raises(ValueError, match="below 1, got 1"):
        MovingAverage(1)


def test_frozen_parts_keep_their_weights_and_their_statistics(tmp_path: Path) -> None:
    task = Classification(**NANO, freeze=["stages.0*", "head.bias"], lr=1e-2)
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    train(task, tmp_path)
    after = task.model.state_dict()
    assert any(isinstance(module, nn.BatchNorm2d) for module in task.model.modules())
    for name, tensor in before.items():
        kept = name.startswith("stages.0") or name == "head.bias"
        if kept:
            assert torch.equal(tensor, after[name]), name
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert not torch.equal(before["stages.1.embed.0.bn.running_mean"],
                           after["stages.1.embed.0.bn.running_mean"])  # fmt: skip


def test_a_schedule_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs an end"):
        train(Classification(**NANO), tmp_path, epochs=-1)
