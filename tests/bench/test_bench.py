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
import torch

from softmaxfree.bench import attention, contestants
from softmaxfree.bench.attention import Case, Preset, run
from softmaxfree.bench.measure import exponent, in_fresh_process, time_interleaved
from softmaxfree.bench.results import table, write_atomically


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
from softmaxfree.bench.results import write_atomically
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
