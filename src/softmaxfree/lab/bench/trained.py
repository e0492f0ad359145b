"""Training runs that a command starts, each in its own folder and process."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...errors import DivergedError, UserError, user_file
from ...files import recipe

STOPPED = [128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
"""Exit codes of a run that a signal has stopped after it saved its state."""


@dataclass(frozen=True)
class TrainedRun:
    """A run of `softmaxfree fit ARGUMENTS` in a folder."""

    folder: Path
    arguments: tuple[str, ...]

    def command(self) -> list[str]:
        return [
            "fit",
            *self.arguments,
            f"--out={self.folder}",
            "--checkpoint=last",
            "--trainer.enable_progress_bar=false",
        ]

    def told(self) -> dict[str, Any]:
        """The run's run.json; empty if it has not begun."""
        path = self.folder / "run.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def refuse_another(self, told: dict[str, Any]) -> None:
        """Raises UserError if the folder holds a run of another command."""
        if told and told["command"] != shlex.join(["softmaxfree", *self.command()]):
            raise UserError(
                f"{self.folder} holds a run of another command, `{told['command']}`: "
                "give another folder with --runs"
            )

    def train(self, threads: int) -> None:
        """Trains in another process, unless it is finished; continues an interrupted run."""
        told = self.told()
        self.refuse_another(told)
        if "scores" in told:
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        log = self.folder.with_name(f"{self.folder.name}.log")
        with user_file(log, "write"), log.open("w") as file:
            done = subprocess.run(
                [sys.executable, "-m", "softmaxfree", *self.command()],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )
        if done.returncode in STOPPED:
            raise UserError(
                f"the run in {self.folder} was stopped before its end: repeat the command to "
                "continue it"
            )
        if done.returncode:
            last = (log.read_text().strip().splitlines() or ["nothing"])[-1]
            diverged = done.returncode == DivergedError.exit_code
            raise (DivergedError if diverged else UserError)(
                f"the run in {self.folder} ended with: {last}; see {log}"
            )


def train_all(runs: Sequence[TrainedRun], workers: int, threads: int, title: str) -> None:
    """Trains several runs at a time. After a failure no further run is started."""
    with ThreadPoolExecutor(workers) as pool:
        try:
            done = pool.map(lambda run: run.train(threads), runs)
            for _ in tqdm(done, total=len(runs), desc=title, unit="run"):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def config(name: str) -> str:
    """The argument that names a recipe, relative to the current folder if it is inside."""
    path, here = recipe(name), Path.cwd()
    return f"--config={path.relative_to(here) if path.is_relative_to(here) else path}"
