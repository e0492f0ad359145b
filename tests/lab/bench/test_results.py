"""Results: whole files, comparisons, and tables that are made from the JSON."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from softmaxfree.errors import UserError
from softmaxfree.files import write_atomically
from softmaxfree.lab.bench import (
    attention,
    detection,
    family,
    lra,
    memory,
    models,
    segmentation,
    sequences,
    speed,
    steps,
    training,
)
from softmaxfree.lab.results import (
    compare,
    comparison,
    provenance,
    read,
    result,
    rows_as_csv,
    table,
)

RESULTS = Path(__file__).parents[3] / "results"
MADE_BY = {
    **{f"attention-{preset}": attention for preset in attention.PRESETS},
    "detection": detection,
    "lra": lra,
    "memory": memory,
    "models": family,
    "models-paper": models,
    "models-replaced": models,
    "models-peers": models,  # models-large is of a contestant that has changed since
    "segmentation": segmentation,
    "sequences": sequences,
    "speed": speed,
    "training-imagenet": training,
    "training-steps": steps,
}


@pytest.mark.parametrize(("name", "module"), MADE_BY.items(), ids=MADE_BY)
def test_tables_are_made_from_the_json(name: str, module: ModuleType) -> None:
    """Commit what `page` makes of a result, never a table edited by hand."""
    content = read(RESULTS / f"{name}.json")
    written = (RESULTS / f"{name}.md").read_text()
    assert module.page(content).markdown(provenance(content)) == written
    csv = RESULTS / f"{name}.csv"
    assert not csv.exists() or csv.read_text() == rows_as_csv(content["rows"])


def test_a_comparison_names_what_changed_and_what_is_missing(tmp_path: Path) -> None:
    before = [{"name": "a", "forward_s": 2.0}, {"name": "gone", "forward_s": 1.0}]
    now = [{"name": "a", "forward_s": 1.0}, {"name": "new", "forward_s": 3.0}]
    changes = compare(now, before, ["name"])
    assert [(c["name"], c["ratio"]) for c in changes] == [("a", 0.5), ("gone", None), ("new", None)]
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(result("x", before) | {"threads": -1}))
    text = comparison(result("x", now), read(path), ["name"])
    assert "Note: threads differ from the earlier run's." in text
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a result of this command"):
        read(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not JSON, as the results"):
        read(path)


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
        with pytest.raises(UserError, match="disk full"):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tables_align() -> None:
    text = table(["name", "ms"], [["a", "1.5"], ["longer", "10.0"]])
    assert text.splitlines() == ["name      ms", "------  ----", "a        1.5", "longer  10.0"]
    assert table(["name", "ms"], [["a", "1.5"]], markdown=True).splitlines()[1] == "| :--- | --: |"
