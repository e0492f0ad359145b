"""How threads wait in commands, as OpenMP's runtime itself reports it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from softmaxfree import threads

from .training.conftest import environment

COMMAND = [sys.executable, "-m", "softmaxfree", "build", "--print_config"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP runtime is Linux's")


def in_force(command: list[str], **settings: str) -> tuple[str, int]:
    """The policy and the number of spins that torch's OpenMP runtime has taken."""
    inherited = {k: v for k, v in environment().items() if k not in threads.SETTINGS}
    done = subprocess.run(
        command, env={**inherited, "OMP_DISPLAY_ENV": "verbose", **settings},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    policy = re.search(r"OMP_WAIT_POLICY = '(\w+)'", done.stderr)
    spins = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if policy is None or spins is None:
        pytest.skip("this torch does not compute with GNU's OpenMP runtime")
    return policy[1], int(spins[1])


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Every core is kept busy by another program."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.slow
def test_beside_busy_programs_threads_sleep_at_once(busy_machine: None) -> None:
    script = Path(sys.executable).with_name("softmaxfree")
    for command in (COMMAND, [str(script), *COMMAND[3:]]):
        assert in_force(command) == ("PASSIVE", 0)


@pytest.mark.slow
def test_a_policy_of_the_users_stays() -> None:
    assert in_force(COMMAND, OMP_WAIT_POLICY="active")[0] == "ACTIVE"
    assert in_force(COMMAND, GOMP_SPINCOUNT="123")[1] == 123


@pytest.mark.slow
def test_a_program_of_the_users_own_is_left_alone(busy_machine: None) -> None:
    assert in_force([sys.executable, "-c", "import softmaxfree"])[1] > 10_000


@pytest.mark.parametrize(("busy", "expected"), [(0.2, threads.BRIEF), (0.9, threads.PASSIVE)])
def test_the_choice_follows_what_others_take(
    busy: float, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in threads.SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "busy_cores", lambda: busy)
    threads.choose_waiting()
    assert {name: os.environ[name] for name in threads.SETTINGS if name in os.environ} == expected


def test_busy_cores_are_counted(busy_machine: None) -> None:
    found = threads.busy_cores(0.5)
    assert found is not None
    assert found > 0.9 * (os.cpu_count() or 1)
