"""The committed results: pages and tables are those that the records give."""

import json
from pathlib import Path

import pytest

from softmaxfree.lab.reproduce.contestants import CONTESTANTS, PAPER
from softmaxfree.lab.reproduce.experiments import PAPERS
from softmaxfree.lab.reproduce.measured import MEASURED
from softmaxfree.lab.reproduce.records import contestant_runs, read_records
from softmaxfree.lab.reproduce.softx import SOFTX
from softmaxfree.lab.reproduce.tables import findings, page_of, scored

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results/reproduction"


def test_the_page_is_what_the_results_say() -> None:
    page = ROOT / "docs/reproduction.md"
    assert page.read_text() == page_of(RESULTS, page)


@pytest.mark.parametrize("name", [*PAPERS, *MEASURED, *SOFTX])
def test_tables_are_what_the_results_say(name: str) -> None:
    if name in SOFTX and not (RESULTS / f"{name}.json").is_file():
        pytest.skip("these runs are not finished")
    assert findings(name, RESULTS).report in (RESULTS / f"{name}.md").read_text()


@pytest.mark.parametrize("name", PAPERS)
def test_records_are_those_of_the_contestants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # commands in the records are as typed there
    records = read_records(RESULTS / "runs.jsonl")
    for contestant in PAPERS[name].contestants:
        for run in contestant_runs(contestant, Path("runs/reproduction"), RESULTS):
            run.refuse_another(records[contestant, run.seed])
    assert len(scored(name, RESULTS)) == len(PAPER.seeds) * len(PAPERS[name].contestants)
    costs = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    assert [row["contestant"] for row in costs] == PAPERS[name].contestants


def test_no_record_is_of_an_unknown_contestant() -> None:
    lines = (RESULTS / "runs.jsonl").read_text().splitlines()
    keys = [(record["contestant"], record["seed"]) for record in map(json.loads, lines)]
    assert keys == sorted((name, seed) for name in CONTESTANTS for seed in PAPER.seeds)
