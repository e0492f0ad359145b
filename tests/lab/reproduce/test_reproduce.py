"""`softmaxfree reproduce`, at toy size: real runs, resumed, judged and written."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from softmaxfree.cli import main
from softmaxfree.errors import DivergedError
from softmaxfree.lab.reproduce.contestants import CONTESTANTS
from softmaxfree.lab.reproduce.experiments import PAPERS, Claim, Experiment
from softmaxfree.lab.reproduce.records import contestant_runs, read_records, sort_records
from softmaxfree.lab.reproduce.reproduce import run_experiments
from softmaxfree.lab.reproduce.softx import EXPERIMENTS
from softmaxfree.lab.reproduce.tables import scored, scores_of, write_tables
from softmaxfree.lab.reproduce.verdicts import VERDICTS
from softmaxfree.lab.results import result


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CIFAR-10 of 80 images."""
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "test"):
        for number in range(10):
            folder = tmp_path / "data/cifar10_whole" / split / f"class{number}"
            folder.mkdir(parents=True)
            for i in range(4):
                pixels = torch.randint(256, (32, 32, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    monkeypatch.setenv("SOFTMAXFREE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


TOY = ("--trainer.max_steps=2", "--data.batch_size=8", "--data.eval_batch_size=40")


@pytest.mark.slow
def test_an_experiment_end_to_end(
    images: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = (Claim("softpp", "soft", "80.9 over 80.9"), Claim("softpp", "soft", "", "accuracy@64"))
    monkeypatch.setitem(EXPERIMENTS, "toy", Experiment("A toy", claims))
    given = {"workers": 2, "threads": 1, "runs": Path("runs"), "out": Path("out")}
    (known,) = contestant_runs("soft", Path("runs"), Path("out"), arguments=TOY, seeds=[0])
    command = {"command": shlex.join(["softmaxfree", *known.command()])}
    Path("out").mkdir()  # a run that has a record is not trained again
    Path("out/runs.jsonl").write_text(record("soft", 0, 0.25, **command) + "\n")
    run_experiments(["toy"], **given, seeds=[0], arguments=TOY)
    assert {path.name for path in Path("runs").iterdir()} == {"softpp-0", "softpp-0.log"}
    told = capsys.readouterr().out
    assert "| softpp > soft at 64 pixels |" in told
    content = json.loads(Path("out/toy.json").read_text())
    assert [row["contestant"] for row in content["rows"]] == ["softpp", "soft"]
    records = Path("out/runs.jsonl").read_text()
    assert len(records.splitlines()) == 2
    assert "--model" not in read_records(Path("out/runs.jsonl"))["softpp", 0]["command"]
    scores = scores_of(scored("toy", Path("out")), "accuracy@64")
    assert f"{scores['softpp'][0]:.1f} over 25.0" in told

    write_tables(Path("out"))
    assert Path("out/toy.png").read_bytes().startswith(b"\x89PNG")
    text = Path("out/toy.md").read_text()
    assert "A toy" in text
    assert "| softpp > soft at 64 pixels |" in text

    with pytest.raises(ValueError, match="holds a run of another command"):
        run_experiments(["toy"], **given, seeds=[0], arguments=(*TOY, "--model.lr=1"))


def record(contestant: str, seed: int, score: float, **more: Any) -> str:
    scores = {"accuracy": {"32": score, "48": score, "64": score}}
    return json.dumps({"contestant": contestant, "seed": seed, "scores": scores} | more)


def test_records_are_sorted_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    lines = [record("softpp", 1, 0.5), record("soft", 0, 0.4), record("softpp", 0, 0.6)]
    path.write_text("\n".join([*lines, lines[0][:20]]))
    sort_records(path)
    assert path.read_text().splitlines() == [lines[1], lines[2], lines[0]]
    assert read_records(path)["softpp", 0]["scores"]["accuracy"]["32"] == 0.6
    assert read_records(tmp_path / "none.jsonl") == {}


def test_tables_and_the_page_are_made_from_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = EXPERIMENTS["samplers"].contestants
    cost = {"parameters": 1, "multiply_adds": 2e6, "image_bytes": 3e6, "images_per_second": 4.0}
    rows = [{"contestant": name} | cost for name in names]
    scores = dict(zip(names, (0.7, 0.7, 0.6, 0.8)))
    Path("out").mkdir()
    Path("out/samplers.json").write_text(json.dumps(result("softmaxfree reproduce", rows)))
    lines = [
        record(name, seed, score + seed / 1000)
        for name, score in scores.items()
        for seed in range(3)
    ]
    Path("out/runs.jsonl").write_text("\n".join(lines))
    main(["reproduce", "--out", "out", "--page", "docs/page.md"])
    assert "| softpp, first tokens  |  80.1 ± 0.1 |" in Path("out/samplers.md").read_text()
    page = Path("docs/page.md").read_text()
    assert "`softmaxfree reproduce samplers`: [all numbers](../out/samplers.md)" in page
    assert "| 80.9 over 79.9 | 70.1 over 80.1 |      -10.0 |" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| Where landmarks")]
    counts = [cell.strip() for cell in line.split("|")[3:-1]]
    words = ["cannot tell", "held", "not held"]
    assert counts == [str(words.count(word)) for word in VERDICTS]
    assert "- `softmaxfree reproduce tied`: Queries and keys" in page.partition("## Not run yet")[2]


def test_a_run_that_diverges_scores_as_guessing_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`softmaxfree fit` then ends with status 3, after it has written what it is."""
    records, ended = tmp_path / "runs.jsonl", list[list[str]]()
    (run,) = contestant_runs("softpp", tmp_path / "runs", tmp_path, seeds=[0])

    def end(words: list[str], stdout: Any, **_: Any) -> subprocess.CompletedProcess[bytes]:
        ended.append(words)
        run.folder.mkdir()
        command = shlex.join(["softmaxfree", *run.command()])
        (run.folder / "run.json").write_text(json.dumps({"command": command}))
        stdout.write("softmaxfree: error: the loss is nan")
        return subprocess.CompletedProcess(words, DivergedError.exit_code)

    monkeypatch.setattr(subprocess, "run", end)
    run.train(1)
    told = read_records(records)["softpp", 0]
    assert "the loss is nan" in told["diverged"]
    assert told["scores"]["accuracy"] == {"32": 0.1, "48": 0.1, "64": 0.1}
    run.train(1)  # is not tried again
    assert len(ended) == 1


def test_claims_name_contestants_that_are_there() -> None:
    used = {name for one in PAPERS.values() for name in one.contestants}
    assert used == set(CONTESTANTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmx"], "there is no experiment 'softmx'; choose among linearisation"),
        ([], "name experiments, or give --all"),
        (["tied", "--all"], "name experiments, or give --all"),
        (["tied", "--workers", "0"], "--workers must be at least 1, got 0"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", *arguments])
    assert message in capsys.readouterr().err
