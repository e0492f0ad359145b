"""The command line, as a user meets it."""

import subprocess
import sys
from pathlib import Path


def softmaxfree(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "softmaxfree.cli", *words], capture_output=True, text=True
    )


def test_without_arguments_it_shows_help() -> None:
    done = softmaxfree()
    assert done.returncode == 0
    assert "Measure speed and memory." in done.stdout


def test_help_teaches() -> None:
    done = softmaxfree("bench", "attention", "--help")
    assert done.returncode == 0
    assert "released formula" in done.stdout
    assert "Threads to compute with" in done.stdout


def test_an_error_is_one_line_without_a_traceback() -> None:
    done = softmaxfree("bench", "attention", "--threads", "0")
    assert done.returncode == 1
    assert done.stderr == "softmaxfree: error: --threads must be at least 1, got 0\n"


def test_a_flag_shows_the_traceback() -> None:
    done = softmaxfree("bench", "attention", "--threads", "0", "--traceback")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_unknown_options_are_refused() -> None:
    done = softmaxfree("bench", "attention", "--presett", "demo")
    assert done.returncode == 2
    assert "presett" in done.stderr
    assert "Traceback" not in done.stderr
    done = softmaxfree("bench", "attention", "--preset", "fast")
    assert done.returncode == 2
    assert "core" in done.stderr


def test_a_missing_extra_is_named_before_the_work_starts(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None; "
        "from softmaxfree.cli import main; main(['bench', 'attention', '--out', 'nowhere'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr == (
        "softmaxfree: error: pictures need matplotlib; "
        "install it with: pip install 'softmaxfree[plots]'\n"
    )
    assert list(tmp_path.iterdir()) == []
