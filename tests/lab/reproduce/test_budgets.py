"""What contestants are trained with: equal cost, seeds and images of their own, verdicts."""

import json
from pathlib import Path

import pytest

from softmaxfree.lab.reproduce.contestants import Budget
from softmaxfree.lab.reproduce.records import contestant_runs
from softmaxfree.lab.reproduce.softx import CHOICES, CIFAR10, EXPERIMENTS, TINY_IMAGENET
from softmaxfree.lab.reproduce.tables import findings
from softmaxfree.lab.reproduce.verdicts import judge
from softmaxfree.lab.results import result
from softmaxfree.models.cost import cost


@pytest.mark.parametrize("budget", [CIFAR10, TINY_IMAGENET], ids=lambda budget: budget.name)
def test_contestants_cost_the_same(budget: Budget) -> None:
    costs = {
        name: cost(contestant.build(budget.classes), 3, budget.side, budget.side).multiply_adds
        for name, contestant in budget.contestants.items()
    }
    assert max(costs.values()) < 1.02 * min(costs.values()), costs


def test_choices_and_verdicts_share_no_seed_and_no_image() -> None:
    for budget in (CIFAR10, TINY_IMAGENET):
        assert not {*budget.seeds} & {*CHOICES.seeds}
        assert budget.corrected
    assert "--data.root=cifar10_whole/train" in CHOICES.arguments  # holds out a fifth of these


def test_runs_of_a_budget_are_its_own(tmp_path: Path) -> None:
    (run,) = contestant_runs("softx", tmp_path, tmp_path / "out", CIFAR10, seeds=[12])
    assert run.folder == tmp_path / "cifar10/softx-12"
    assert run.records == tmp_path / "out/cifar10.jsonl"
    assert {"--trainer.max_steps=3900", "--seed_everything=12"} <= {*run.arguments}
    assert len(contestant_runs("softx", tmp_path, tmp_path, CIFAR10)) == len(CIFAR10.seeds)


def test_several_claims_share_the_5_percent(tmp_path: Path) -> None:
    """Scores of two seeds, and a difference that one claim alone could have shown."""
    name = "softx-cifar10"
    names = EXPERIMENTS[name].contestants
    cost = {"parameters": 1, "multiply_adds": 2e6, "image_bytes": 3e6, "images_per_second": 4.0}
    rows = [{"contestant": contestant} | cost for contestant in names]
    (tmp_path / f"{name}.json").write_text(json.dumps(result("softmaxfree reproduce", rows)))
    records = [
        {"contestant": contestant, "seed": seed}
        | {"scores": {"accuracy": {"32": 0.6 + 0.02 * (contestant == "softx") + seed / 2000}}}
        for contestant in names
        for seed in (10, 20)
    ]
    (tmp_path / CIFAR10.records).write_text("\n".join(map(json.dumps, records)))
    found = findings(name, tmp_path)
    assert f"Student's t at {100 - 5 / len(EXPERIMENTS[name].claims):g} %" in found.report
    assert "seeds [10, 20]" in found.report
    scores = {one: [60 + 2 * (one == "softx") + seed / 20 for seed in (10, 20)] for one in names}
    level = 1 - 0.05 / len(EXPERIMENTS[name].claims)
    smallest = judge(scores, "softx", "softmax", level).smallest
    assert judge(scores, "softx", "softmax").smallest < smallest
    (line,) = [x for x in found.claims.splitlines() if x.startswith("| softx > softmax ")]
    assert f" {smallest:.1f} |" in line
