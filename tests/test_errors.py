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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["predict"], "images and --checkpoint must be given; --help explains"),
        (["predict", "a.png", "--top", "all", "--checkpoint", "b"], "--top must be a whole number"),
        (["export", "softpp_nano"], "target must be given; --help explains"),
        (["export", "softpp_nano", "a.onnx", "b"], "'b' is not expected here; --help lists"),
        (["runs", "a", "--output", "b"], "there is no option --output; did you mean --out?"),
        (["bench", "attention", "--threads"], "--threads needs a value"),
        (["bench", "attention", "--preset", "x"], "--preset must be one of paper, core, demo, li"),
        (["bench", "attention", "--config", "x"], "there is no file "),
        (["fitt"], "softmaxfree has no command 'fitt'; did you mean fit?"),
        (["bench", "nothing"], "softmaxfree bench has no command 'nothing'; choose one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_line_that_is_not_understood_is_answered_in_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    said = capsys.readouterr().err
    assert said.startswith(f"softmaxfree: error: {sentence}")
    assert said.count("\n") == 1


def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/inside\.json: "):
        write_atomically(tmp_path / "file" / "inside.json", "{}")


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
