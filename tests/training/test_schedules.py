"""However often a run is killed, and wherever: it ends as one that never was, to the bit."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .conftest import environment
from .schedules import Kill, Plan, broken, differences, unbroken

SMALL = Plan(batches=2, max_epochs=4)


@pytest.mark.parametrize("steps", [(2, 4), (2, 3, 4, 6)], ids=str)
def test_killed_when_checkpoints_of_an_epochs_end_are_written(steps: tuple[int, ...]) -> None:
    """Two steps an epoch. A run killed twice at such a time once trained an epoch twice."""
    kills = [Kill(f"{'on_train_batch_end' if step % 2 else 'last.ckpt'} {step}") for step in steps]
    assert differences(unbroken(SMALL), broken(SMALL, *kills)) == []
    assert unbroken(SMALL)["result"]["steps"] == 8


def test_the_validation_after_a_checkpoint_is_made_up_for() -> None:
    """Of a run of one epoch it is the only one, and best.ckpt comes of it."""
    plan = Plan(batches=2, max_epochs=1)
    cut = broken(plan, Kill("last.ckpt 2"), Kill("on_validation_batch_end 2"))
    assert cut["best.ckpt"]["global_step"] == 2
    assert differences(unbroken(plan), cut) == []


@pytest.mark.parametrize("event", ["last.ckpt 5", "on_train_end 5"])
def test_a_run_of_steps_that_ends_in_mid_epoch_keeps_its_score(event: str) -> None:
    """The score is the averaged weights', which a run with nothing left to train once lost."""
    plan = Plan(batches=4, max_steps=5)
    assert differences(unbroken(plan), broken(plan, Kill(event))) == []


@pytest.mark.parametrize(
    ("event", "number"),
    [
        ("on_validation_batch_end 3", signal.SIGTERM),
        ("on_validation_end 3", signal.SIGUSR1),
        ("on_train_epoch_end 4", signal.SIGINT),
    ],
)
def test_a_signal_in_validation_or_at_an_epochs_end_loses_nothing(event: str, number: int) -> None:
    plan = Plan(batches=4, max_steps=9, val_check_interval=3)
    assert differences(unbroken(plan), broken(plan, Kill(event, number))) == []


NUMBERS = st.sampled_from([signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGINT])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    batches = draw(st.integers(1, 5))
    ends = draw(st.sampled_from([{"max_epochs": 2}, {"max_epochs": 3}, {"max_steps": 5},
                                 {"max_steps": 8}]))  # fmt: skip
    used = draw(st.sampled_from([batches, batches, max(batches - 1, 1)]))
    validation = draw(st.sampled_from(["every epoch", "every second", "within", "by steps"]))
    return Plan(
        batches=batches,
        save_every=draw(st.sampled_from([1, 2, 3, 100])),
        **ends,
        check_val_every_n_epoch={"every second": 2, "by steps": None}.get(validation, 1),
        val_check_interval={"within": min(2, used), "by steps": 3}.get(validation, 1.0),
        limit_train_batches=1.0 if used == batches else used,
        accumulate_grad_batches=draw(st.sampled_from([1, 1, 1, 2])),
        ema=draw(st.sampled_from([0.9, 0.9, None])),
        workers=draw(st.sampled_from([0] * 7 + [1])),
    )


SCHEDULES = st.tuples(
    plans(), st.lists(st.builds(Kill, st.integers(0, 60), NUMBERS), min_size=1, max_size=4)
)
"""One to four kills, each so many events after its process has begun; there are 40 to 150."""


def profile(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@seed(0)
@profile(4)
@given(SCHEDULES)
def test_a_few_schedules(schedule: tuple[Plan, list[Kill]]) -> None:
    plan, kills = schedule
    assert differences(unbroken(plan), broken(plan, *kills)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_two_hundred_schedules(part: int) -> None:
    """In two processes of their own: forks of a process that has run other tests are slow."""
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, str(part)],
        cwd=Path(__file__).parents[2], env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def hundred_schedules(part: int) -> None:
    @seed(part)
    @profile(100)
    @given(SCHEDULES)
    def check(schedule: tuple[Plan, list[Kill]]) -> None:
        plan, kills = schedule
        assert differences(unbroken(plan), broken(plan, *kills)) == []

    check()


if __name__ == "__main__":
    hundred_schedules(int(sys.argv[1]))
