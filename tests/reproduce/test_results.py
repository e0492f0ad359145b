"""The committed results: the page, the verdicts and the scores are those of the records."""

import json
from pathlib import Path

import pytest

from softmaxfree.reproduce.command import claim_cells, judged, row
from softmaxfree.reproduce.contestants import contestant_runs
from softmaxfree.reproduce.experiments import EXPERIMENTS
from softmaxfree.reproduce.page import page_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/reproduction"


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
        folders = Path("runs/reproduction"), RESULTS / "runs"
        for run in contestant_runs(contestant, *folders, seeds=EXPERIMENTS[name].seeds):
            run.refuse_another(run.told())
            rows.append(row(contestant, run))
    assert len(rows) == len(EXPERIMENTS[name].seeds) * len(EXPERIMENTS[name].contestants)
    assert content["rows"] == rows
    claims = judged(EXPERIMENTS[name], rows)
    assert [claim_cells(claim) for claim in content["claims"]] == [*map(claim_cells, claims)]
