"""`softmaxfree bench lra`: tasks of the Long Range Arena by attentions and seeds."""

import json
import statistics
from itertools import chain
from pathlib import Path
from typing import Literal

from ...environment import command_line
from ...errors import UserError
from ...files import recipe
from ...imports import Names, import_modules, listed, needs
from ...layers.registry import attention_class
from ..measure import check_machine
from ..paper import LRA
from ..results import Column, Note, Page, Row, Table, columns, publish, result
from .trained import TrainedRun, config, train_all

with needs("train"):
    import yaml

    from ...data.sequences import open_sequences

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
SHORT = ("listops", "text", "image")
"""Tasks with short runs."""

_OF_THE_TRAINER = ("precision", "gradient_clip_val", "accumulate_grad_batches")
_MAY_DIFFER = {"attention", "options", "seed", "eval_batch_size", "num_workers"}
"""Settings that may differ between compared runs: the contestants, and what does not affect
learning."""


def lra_run(
    runs: Path, task: str, attention: str, seed: int, short: bool, arguments: list[str]
) -> TrainedRun:
    """One cell of the table."""
    names = [task, f"short_{task}"] if short else [task]
    return TrainedRun(
        runs / f"{task}-{attention}-{seed}",
        (
            *(config(f"lra/{name}.yaml") for name in names),
            f"--model.attention={attention}",
            f"--seed_everything={seed}",
            *arguments,
        ),
    )


def bench_lra(
    tasks: list[Literal["listops", "text", "retrieval", "image", "pathfinder"]] | None = None,
    contestants: list[str] | None = None,
    seeds: list[int] | None = None,
    short: bool = False,
    workers: int = 1,
    threads: int = 1,
    runs: Path = Path("runs/lra"),
    out: Path = Path("results"),
    modules: Names = None,
    fit: list[str] | None = None,
) -> Row:
    """Train tasks of the Long Range Arena with several attentions, and print the paper's table.

    Each run follows its recipe in recipes/lra. An interrupted command continues where it was. The
    tables cover all runs in the folder, those of earlier commands too: accuracy beside the
    paper's, time and memory of a step. They are written as JSON, CSV and Markdown.

    Args:
        tasks: Names of tasks, such as [text,image]; the paper's four if not given, and three with
            --short.
        contestants: Names of attentions, such as [softpp,softmax]; soft, softpp and the paper's
            peers if not given.
        seeds: Seeds, with a run for each; [0] if not given.
        short: Runs of minutes on a CPU in place of the benchmark's hours on a GPU, for listops,
            text and image: fewer steps, shorter sequences, a higher learning rate.
        workers: Runs at a time.
        threads: Threads to compute with, in each run.
        runs: Folder of the runs.
        out: Folder for the results.
        modules: Python modules to import first, which register attentions of your own.
        fit: Further arguments of `softmaxfree fit` for all runs, such as
            ["--model.options.num_landmarks=128"].
    """
    check_machine(threads)
    if workers < 1:
        raise UserError(f"--workers must be at least 1, got {workers}")
    import_modules(modules)
    names = contestants or ["softpp", *LRA]
    for name in names:
        attention_class(name)  # raises UserError for an unknown one
    chosen: list[str] = [*(tasks or [])] or [
        task for task in (SHORT if short else TASKS) if task in LRA["soft"]
    ]
    if short and (others := [task for task in chosen if task not in SHORT]):
        raise UserError(
            f"there are no short runs of {', '.join(others)}, but of {', '.join(SHORT)}: "
            "leave out --short, or the task"
        )
    arguments = [*(fit or []), *([f"--modules=[{','.join(listed(modules))}]"] if modules else [])]
    cells = {
        (seed, task, name): lra_run(runs, task, name, seed, short, arguments)
        for seed in seeds or [0]
        for task in chosen
        for name in names
    }
    if not any(argument.startswith("--data.root") for argument in arguments):
        check_data({task for (_, task, _), cell in cells.items() if "scores" not in cell.told()})
    train_all([*cells.values()], workers, threads, "bench lra")
    return publish(out / "lra", result(command_line(), rows_in(runs)), page)


def check_data(tasks: set[str]) -> None:
    """Raises UserError now, not after other runs, if the data of a task are missing."""
    for task in sorted(tasks):
        data = yaml.safe_load(recipe(f"lra/{task}.yaml").read_text())["data"]["init_args"]
        for split in ("train", "val"):
            open_sequences(task, data.get("root"), split)


def rows_in(runs: Path) -> list[Row]:
    """All finished runs of a folder; raises UserError if runs of a task cannot be compared."""
    rows, settings = [], []
    for path in sorted(runs.glob("*/run.json")):
        told = json.loads(path.read_text())
        if "scores" in told:
            given = yaml.safe_load((path.parent / "config.yaml").read_text())
            rows.append(row_of(given, told))
            trainer = {name: given["trainer"].get(name) for name in _OF_THE_TRAINER}
            model, data = given["model"]["init_args"], given["data"]["init_args"]
            settings.append({**rows[-1]["setting"], **trainer, **model, **data})
    for task in TASKS:
        first, *others = [s for row, s in zip(rows, settings) if row["task"] == task] or [{}]
        for setting in others:
            common = first.keys() & setting.keys() - _MAY_DIFFER
            if differing := sorted(name for name in common if setting[name] != first[name]):
                name = differing[0]
                raise UserError(
                    f"runs of {task} in {runs} cannot be compared: {name} is {first[name]} "
                    f"in one and {setting[name]} in another; give another folder with --runs"
                )
    return rows


def row_of(given: Row, told: Row) -> Row:
    """A finished run as a row, from its configuration and its run.json."""
    data, model = given["data"]["init_args"], given["model"]["init_args"]
    return {
        "task": data["name"],
        "attention": model["attention"],
        "options": model["options"],
        "seed": given["seed_everything"],
        "accuracy": told["scores"]["accuracy"],
        "step_s": told["seconds_per_step"],
        "peak_bytes": told["peak_bytes"],
        "minutes": told["seconds"] / 60,
        "setting": {
            "steps": given["trainer"]["max_steps"],
            "batch_size": data["batch_size"],
            "length": data["max_length"] or model["length"],
            "train_samples": data["train_samples"],
            "val_samples": data["val_samples"],
            "lr": model["lr"],
            "threads": told["threads"],
        },
        **{name: told[name] for name in ("command", "commit", "hardware", "versions")},
    }


def page(content: Row) -> Page:
    note = """\
Scores are of the last weights on held-out samples; ± is half the range of the seeds. The paper's
are of the whole benchmark, on far more steps: they are beside ours to be looked at, not to be
compared. Among ours all that differs within a task is the attention. Times are of runs that may
have had neighbours on the machine, so that `softmaxfree bench sequences` compares them better.
Memory is the largest of the process, libraries included. Without a number of samples all are used;
minutes are those of the longest run."""
    return Page("Long Range Arena", [*tables(content), settings(content), Note(note)])


def tables(content: Row) -> list[Table]:
    """Accuracies beside the paper's, then time and memory of a step; the best comes first."""
    rows = content["rows"]
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    lines = []
    for name in dict.fromkeys(row["attention"] for row in rows):
        line: Row = {"attention": name}
        means = []
        for task in tasks:
            own = [row for row in rows if (row["attention"], row["task"]) == (name, task)]
            accuracies = [100 * row["accuracy"] for row in own]
            means += [statistics.fmean(accuracies)] if own else []
            spread = f"±{(max(accuracies) - min(accuracies)) / 2:.1f}" if len(own) > 1 else ""
            line[task] = f"{means[-1]:.1f}{spread}" if own else "-"
            line[f"{task} paper"] = LRA.get(name, {}).get(task, "-")
            line[f"{task} ms"] = min((row["step_s"] for row in own), default="-")
            line[f"{task} MB"] = min((row["peak_bytes"] for row in own), default="-")
        line["mean"] = statistics.fmean(means) if len(means) == len(tasks) else "-"
        lines.append(line)
    lines.sort(key=lambda line: 0 if line["mean"] == "-" else -line["mean"])
    scores = [(Column(task, task, 1), Column("paper", f"{task} paper", 1)) for task in tasks]
    times = [Column(f"{task} ms", f"{task} ms", 0, 1e-3) for task in tasks]
    memory = [Column(f"{task} MB", f"{task} MB", 0, 1e6) for task in tasks]
    mean = Column("mean", "mean", 1)
    return [
        columns(lines, Column("accuracy, %", "attention"), *chain(*scores), mean),
        columns(lines, Column("a step", "attention"), *times, *memory),
    ]


def settings(content: Row) -> Table:
    """How each task was trained."""
    lines = []
    for task in TASKS:
        if rows := [row for row in content["rows"] if row["task"] == task]:
            seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
            minutes = f"{max(row['minutes'] for row in rows):.1f}"
            lines.append(rows[0]["setting"] | {"task": task, "seeds": seeds, "minutes": minutes})
    names = ["task", "steps", "batch_size", "length", "train_samples", "val_samples", "lr"]
    names += ["threads", "seeds", "minutes"]
    return columns(lines, *(Column(name.replace("_", " "), name) for name in names))
