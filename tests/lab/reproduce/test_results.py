"""The committed results: the page, the verdicts and the scores are those of the records."""

import json
from pathlib import Path

import pytest
import timm
import torch

from softmaxfree.lab.reproduce.command import claim_cells, judged, row
from softmaxfree.lab.reproduce.contestants import CLASSES, CONTESTANTS, SEEDS, SIDE, contestant_runs
from softmaxfree.lab.reproduce.experiments import EXPERIMENTS
from softmaxfree.lab.reproduce.page import page_of
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


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_verdicts_follow_from_the_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # commands in the records are as typed there
    if not (RESULTS / f"{name}.json").is_file():
        pytest.skip(f"{name} has not been run: docs/reproduction.md lists it")
    content = json.loads((RESULTS / f"{name}.json").read_text())
    rows = []
    for contestant in EXPERIMENTS[name].contestants:
        for run in contestant_runs(contestant, Path("runs/reproduction"), RESULTS / "runs"):
            run.refuse_another(run.told())
            rows.append(row(contestant, run))
    assert len(rows) == len(SEEDS) * len(EXPERIMENTS[name].contestants)
    assert content["rows"] == rows
    claims = judged(EXPERIMENTS[name], rows)
    assert [claim_cells(claim) for claim in content["claims"]] == [*map(claim_cells, claims)]
