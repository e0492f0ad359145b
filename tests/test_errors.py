"""A mistake is one sentence; a bug keeps its traceback, on the screen and in the run's folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from softmaxfree import cli
from softmaxfree.errors import UserError
from softmaxfree.files import write_atomically

from .training.conftest import environment


@pytest.mark.parametrize("bug", [ValueError, RuntimeError, OSError, KeyError, ModuleNotFoundError])
def test_a_bug_is_not_shortened(
    bug: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: list[str]) -> None:
        raise bug("a bug of ours")

    monkeypatch.setattr("softmaxfree.training.runs.runs", broken)
    with pytest.raises(bug, match="a bug of ours"):
        cli.main(["runs"])
    assert capsys.readouterr().err == ""


def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/inside\.json: "):
        write_atomically(tmp_path / "file" / "inside.json", "{}")


@pytest.mark.slow
def test_a_command_whose_reader_leaves_ends_quietly() -> None:
    """As `softmaxfree bench attention --help | head -1` does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "softmaxfree", "bench", "attention", "--help"],
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait() in (0, 128 + 13)  # argparse hides it from us
