"""The measurements: right contestants, whole files, honest notes; no assertion on time."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import timm
import torch

from softmaxfree.bench import attention, contestants, models
from softmaxfree.bench.attention import Case, Preset, run
from softmaxfree.bench.measure import exponent, in_fresh_process, time_interleaved
from softmaxfree.bench.results import table
from softmaxfree.files import write_atomically
from softmaxfree.models.cost import cost


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = Preset(
        "small", [Case(1, 2, n) for n in (3136, 6272)], list(contestants.CONTESTANTS), repeats=1
    )
    monkeypatch.setitem(attention.PRESETS, "small", preset)
    monkeypatch.setattr(attention, "MEMORY_LIMIT", 500e6)


@pytest.mark.usefixtures("small")
def test_a_run_writes_table_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("small", threads=None, out=tmp_path, memory=False)
    content = json.loads((tmp_path / "attention-small.json").read_text())
    assert {
        "schema_version",
        "command",
        "commit",
        "hardware",
        "versions",
        "threads",
        "rows",
    } <= set(content)
    assert content["versions"]["torch"] == torch.__version__
    assert len(content["rows"]) == 10
    assert (tmp_path / "attention-small.png").read_bytes().startswith(b"\x89PNG")
    assert "| 1, 2, 3,136     | SOFT++ " in (tmp_path / "attention-small.md").read_text()
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if not line.startswith("written: ")]
    assert max(map(len, lines)) <= 100
    # 6272^2 pairs, two heads, 8 bytes each, are over the limit: said, not dropped.
    assert "not run: needs 0.6 GiB" in printed
    notes = [row for row in content["rows"] if "note" in row]
    assert [(row["contestant"], row["n"]) for row in notes] == [("softmax", 6272)]


def test_contestants_are_checked_before_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    contestants.verify()
    wrong = contestants.Contestant(lambda q, v, landmarks: 1.001 * v, "a cheat")
    monkeypatch.setitem(contestants.CONTESTANTS, "softpp", wrong)
    with pytest.raises(RuntimeError, match="a cheat does not compute what it should"):
        contestants.verify()


def test_contestants_take_turns() -> None:
    order: list[str] = []

    def contestant(name: str) -> None:
        order.append(name)
        time.sleep(0.03)

    timings = time_interleaved(
        {"a": lambda: contestant("a"), "b": lambda: contestant("b")}, repeats=3
    )
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b"] * 3
    assert all(0 < timing.best <= timing.median for timing in timings.values())


def test_exponent() -> None:
    assert exponent([10, 100, 1000], [3.0, 300.0, 30000.0]) == pytest.approx(2)


def test_memory_is_that_of_the_call() -> None:
    """Plain softmax forms two n x n matrices."""
    n = 4000
    case = asdict(Case(1, 1, n))
    arguments = {"case": case, "gradients": False, "threads": 1}
    measured = in_fresh_process(attention.__name__, contestant="softmax", **arguments)
    assert measured == pytest.approx(2 * 4 * n**2, rel=0.1)


@pytest.mark.slow
def test_memory_grows_linearly_and_a_million_tokens_fit() -> None:
    """Forward and backward, one head of width 32."""
    sizes = [3136, 25_088, 200_704, 1_000_000]
    measured = [
        in_fresh_process(
            attention.__name__, case=asdict(Case(1, 1, n)), contestant="softpp", gradients=True,
            threads=1,
        )
        for n in sizes
    ]  # fmt: skip
    assert exponent(sizes[:3], measured[:3]) <= 1.05
    assert measured[-1] < 4e9


def test_a_kill_leaves_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    script = f"""
from pathlib import Path
from softmaxfree.files import write_atomically
while True:
    for letter in "ab":
        write_atomically(Path({str(path)!r}), letter * 5_000_000)
        print(letter, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    content = path.read_text()
    assert len(content) == 5_000_000
    assert len(set(content)) == 1


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tables_align() -> None:
    text = table(["name", "ms"], [["a", "1.5"], ["longer", "10.0"]])
    assert text.splitlines() == ["name      ms", "------  ----", "a        1.5", "longer  10.0"]
    assert table(["name", "ms"], [["a", "1.5"]], markdown=True).splitlines()[1] == "| :--- | --: |"


def test_models_against_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"depths": (1, 1, 1, 1)}
    plan = models.Preset(
        "a test",
        [
            models.Contestant("peer", "softpp_nano", arguments=small | {"attention": "released"}),
            models.Contestant("ours", "softpp_nano", "peer", small),
            models.Contestant("NCHW", "softpp_nano", "peer", small, channels_last=False),
        ],
        (2, 3, 32, 32),
        repeats=1,
        training=True,
    )
    monkeypatch.setitem(models.PRESETS, "speed", plan)
    threads = torch.get_num_threads()
    try:
        content = models.run("speed", 1, tmp_path)
    finally:
        torch.set_num_threads(threads)
    written = json.loads((tmp_path / "models-speed.json").read_text())
    assert [row["title"] for row in written["rows"]] == ["peer", "ours", "NCHW"]
    for row in content["rows"]:
        assert row["inference_s"] > 0
        assert row["training_s"] > row["inference_s"]
    assert "peer" in capsys.readouterr().out
    assert "| ours " in (tmp_path / "models-speed.md").read_text()


def test_the_released_formula_is_what_it_claims() -> None:
    """One image, one head: there the release's step size is that of `backtrack`."""
    arguments = {"depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "dtype": torch.float64}
    ours = timm.create_model("softpp_nano", inverse="backtrack", **arguments).eval()
    theirs = timm.create_model("softpp_nano", attention="released", **arguments).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(theirs(x), ours(x), atol=1e-8, rtol=1e-8)


@pytest.mark.slow
def test_an_image_of_800_x_1333_pixels_fits_into_1500_mb() -> None:
    """Of a fresh process, its libraries included."""
    taken = in_fresh_process(
        "softmaxfree.bench.models", preset="large", title="softpp_tiny_fudan, auto", threads=1
    )
    assert 3e8 < taken < 1.5e9


@pytest.mark.parametrize("inverse", ["auto", "cholesky", "newton", "damped", "backtrack", "exact"])
def test_the_cost_without_the_inverse_does_not_depend_on_it(inverse: str) -> None:
    arguments = {"depths": (1, 1, 1, 1), "img_size": 64}
    expected = cost(timm.create_model("soft_nano", **arguments), 3, 64, 64)
    found = cost(timm.create_model("soft_nano", inverse=inverse, **arguments), 3, 64, 64)
    bare = expected.multiply_adds - expected.inverse
    assert found.multiply_adds - found.inverse == pytest.approx(bare, rel=1e-3)
