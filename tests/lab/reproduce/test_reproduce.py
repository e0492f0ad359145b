"""`softmaxfree reproduce`, at toy size: real runs, resumed, judged and written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from softmaxfree.cli import main
from softmaxfree.lab.reproduce import command, contestants, experiments
from softmaxfree.lab.reproduce.experiments import EXPERIMENTS, Claim, Experiment
from softmaxfree.lab.reproduce.verdicts import VERDICTS


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
    command.run(["toy"], **given, seeds=[0], arguments=TOY)
    told = capsys.readouterr().out
    assert "softpp > soft at 64 pixels" in told
    content = json.loads(Path("out/toy.json").read_text())
    assert [(row["contestant"], row["seed"]) for row in content["rows"]] == [
        ("softpp", 0), ("soft", 0)
    ]  # fmt: skip
    scores = command.scores_of(content["rows"], "accuracy@64")
    mean = {name: sum(values) / len(values) for name, values in scores.items()}
    assert content["claims"][1]["difference"] == pytest.approx(mean["softpp"] - mean["soft"])
    assert "--model" not in content["rows"][0]["command"]
    assert Path("out/toy.png").read_bytes().startswith(b"\x89PNG")
    assert "A toy" in Path("out/toy.md").read_text()
    assert Path("out/toy.csv").read_text().count("\n") == 3

    content["claims"][0]["verdict"] = "held"
    Path("out/samplers.json").write_text(json.dumps(content))
    main(["reproduce", "--out", "out", "--page", "docs/page.md"])
    page = Path("docs/page.md").read_text()
    assert "`softmaxfree reproduce samplers`: [all numbers](../out/samplers.md)" in page
    assert "80.9 over 80.9" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| Where landmarks")]
    counts = [cell.strip() for cell in line.split("|")[3:-1]]
    words = [claim["verdict"] for claim in content["claims"]]
    assert counts == [str(words.count(word) or "-") for word in VERDICTS]
    assert "- `softmaxfree reproduce tied`: Queries and keys" in page.partition("## Not run yet")[2]

    shutil.rmtree("runs")  # the records stay, and a run that has one is not trained again
    command.run(["toy"], **given, seeds=[0], arguments=TOY)
    assert not Path("runs").exists()
    assert json.loads(Path("out/toy.json").read_text())["rows"] == content["rows"]
    with pytest.raises(ValueError, match="holds a run of another command"):
        command.run(["toy"], **given, seeds=[0], arguments=(*TOY, "--model.lr=1"))


@pytest.mark.slow
def test_a_run_that_diverges_scores_as_guessing_does(images: None, tmp_path: Path) -> None:
    arguments = (*TOY[1:], "--trainer.max_steps=20", "--model.lr=1e20", "--model.warmup_steps=0")
    folders = tmp_path / "runs", tmp_path / "records"
    (run,) = contestants.contestant_runs("softpp", *folders, arguments, seeds=[0])
    run.train(1)
    row = command.row("softpp", run)
    assert row["diverged"]
    assert row["accuracy@32"] == row["accuracy@64"] == 0.1
    run.train(1)  # is not tried again


def test_claims_name_contestants_that_are_there() -> None:
    for experiment in experiments.EXPERIMENTS.values():
        assert set(experiment.contestants) <= set(contestants.CONTESTANTS)
    used = {name for one in experiments.EXPERIMENTS.values() for name in one.contestants}
    assert used == set(contestants.CONTESTANTS)


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
