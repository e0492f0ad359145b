"""The committed results: pages and tables are those that the records give."""

import json
from pathlib import Path

import pytest
import timm
import torch

from softmaxfree.lab.reproduce.contestants import CLASSES, CONTESTANTS, SEEDS, SIDE
from softmaxfree.lab.reproduce.experiments import EXPERIMENTS
from softmaxfree.lab.reproduce.records import contestant_runs, read_records
from softmaxfree.lab.reproduce.tables import findings, page_of, scored, titles
from softmaxfree.models.cost import cost

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results/reproduction"


def test_softx_nano_is_what_beat_softpp_at_equal_cost() -> None:
    softx = timm.create_model("softx_nano", num_classes=CLASSES)
    contestant = CONTESTANTS["softx, what gained alone"].build()
    contestant.load_state_dict(softx.state_dict())
    images = torch.randn(2, 3, SIDE, SIDE)
    assert torch.equal(softx.eval()(images), contestant.eval()(images))
    ours, papers = (cost(CONTESTANTS[name].build(), 3, SIDE, SIDE) for name in (
        "softx, what gained alone", "softpp"
    ))  # fmt: skip
    assert ours.parameters < papers.parameters
    assert ours.multiply_adds == pytest.approx(papers.multiply_adds, rel=0.01)


def test_the_page_is_what_the_results_say() -> None:
    page = ROOT / "docs/reproduction.md"
    assert page.read_text() == page_of(RESULTS, page)


@pytest.mark.parametrize("name", titles())
def test_tables_are_what_the_results_say(name: str) -> None:
    assert findings(name, RESULTS).report in (RESULTS / f"{name}.md").read_text()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_records_are_those_of_the_contestants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # commands in the records are as typed there
    records = read_records(RESULTS / "runs.jsonl")
    for contestant in EXPERIMENTS[name].contestants:
        for run in contestant_runs(contestant, Path("runs/reproduction"), RESULTS / "runs.jsonl"):
            run.refuse_another(records[contestant, run.seed])
    assert len(scored(name, RESULTS)) == len(SEEDS) * len(EXPERIMENTS[name].contestants)
    costs = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    assert [row["contestant"] for row in costs] == EXPERIMENTS[name].contestants


def test_no_record_is_of_an_unknown_contestant() -> None:
    lines = (RESULTS / "runs.jsonl").read_text().splitlines()
    keys = [(record["contestant"], record["seed"]) for record in map(json.loads, lines)]
    assert keys == sorted((name, seed) for name in CONTESTANTS for seed in SEEDS)
