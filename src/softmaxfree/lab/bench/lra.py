"""`softmaxfree bench lra`: tasks of the Long Range Arena by attentions and seeds."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ...data.sequences import open_sequences
from ...environment import command_line
from ...errors import UserError
from ...files import recipe
from ...imports import import_modules
from ...layers.registry import attention_class
from ..results import provenance, result, table, write
from .trained import TrainedRun, config, train_all

PAPER = {
    "softmax": {"listops": 37.10, "text": 65.02, "retrieval": 79.35, "image": 38.20},
    "reformer": {"listops": 19.05, "text": 64.88, "retrieval": 78.64, "image": 43.29},
    "linformer": {"listops": 37.25, "text": 55.91, "retrieval": 79.37, "image": 37.84},
    "performer": {"listops": 18.80, "text": 63.81, "retrieval": 78.62, "image": 37.07},
    "nystromformer": {"listops": 37.15, "text": 65.52, "retrieval": 79.56, "image": 41.58},
    "soft": {"listops": 37.40, "text": 63.49, "retrieval": 81.77, "image": 46.91},
}
"""Accuracies in per cent of its table, without pathfinder, which it left out."""

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
SHORT = ("listops", "text", "image")
"""Those that there are short runs of."""

_OF_THE_TRAINER = ("precision", "gradient_clip_val", "accumulate_grad_batches")
_MAY_DIFFER = {"attention", "options", "seed", "eval_batch_size", "num_workers"}
"""Between runs that are compared: what is compared, and what has no part in learning."""


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


def run(
    tasks: list[str],
    attentions: list[str],
    seeds: list[int],
    short: bool,
    workers: int,
    threads: int,
    runs: Path,
    out: Path,
    modules: list[str],
    arguments: list[str],
) -> dict[str, Any]:
    """Trains what is not yet trained; writes JSON, CSV and Markdown; prints the tables.

    The tables are of all runs in the folder, those of earlier commands too.
    """
    import_modules(modules)
    for attention in attentions:
        attention_class(attention)  # refuses one that is not there
    if short and (others := [task for task in tasks if task not in SHORT]):
        raise UserError(
            f"there are no short runs of {', '.join(others)}, but of {', '.join(SHORT)}: "
            "leave out --short, or the task"
        )
    if modules:
        arguments = [*arguments, f"--modules=[{','.join(modules)}]"]
    cells = {
        (seed, task, attention): lra_run(runs, task, attention, seed, short, arguments)
        for seed in seeds
        for task in tasks
        for attention in attentions
    }
    if not any(argument.startswith("--data.root") for argument in arguments):
        check_data({task for (_, task, _), cell in cells.items() if "scores" not in cell.told()})
    train_all([*cells.values()], workers, threads, "bench lra")
    content = result(command_line(), rows_in(runs))
    stem = out / "lra"
    write(stem, content, markdown(content))
    print(report(content))
    print(f"\nwritten: {stem}.json, .csv and .md")
    return content


def check_data(tasks: set[str]) -> None:
    """Refuses tasks whose data are not there: now, not after the runs of the others."""
    for task in sorted(tasks):
        data = yaml.safe_load(recipe(f"lra/{task}.yaml").read_text())["data"]["init_args"]
        for split in ("train", "val"):
            open_sequences(task, data.get("root"), split)


def rows_in(runs: Path) -> list[dict[str, Any]]:
    """All finished runs of a folder; refuses a task whose runs cannot be compared."""
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


def row_of(given: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """A finished run as a row, of its configuration and what it has written of itself."""
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


def report(content: dict[str, Any], markdown: bool = False) -> str:
    """Accuracies beside the paper's, then time and memory of a step."""
    rows = content["rows"]
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    attentions = list(dict.fromkeys(row["attention"] for row in rows))

    def found(attention: str, task: str, quantity: str) -> list[float]:
        return [
            row[quantity] for row in rows if (row["attention"], row["task"]) == (attention, task)
        ]

    def average(attention: str) -> float | None:
        values = [found(attention, task, "accuracy") for task in tasks]
        return 100 * statistics.fmean(map(statistics.fmean, values)) if all(values) else None

    lines, costs = [], []
    for attention in sorted(attentions, key=lambda name: average(name) or 0, reverse=True):
        paper = PAPER.get(attention, {})
        scores = [
            (_accuracy(found(attention, task, "accuracy")), paper.get(task)) for task in tasks
        ]
        lines.append(
            [
                attention,
                *(cell for mine, theirs in scores for cell in (mine, _percent(theirs))),
                _percent(average(attention)),
            ]
        )
        costs.append(
            [
                attention,
                *(_smallest(found(attention, task, "step_s"), 1e-3) for task in tasks),
                *(_smallest(found(attention, task, "peak_bytes"), 1e6) for task in tasks),
            ]
        )
    columns = [name for task in tasks for name in (task, "paper")]
    accuracy = table(["accuracy, %", *columns, "mean"], lines, 1, markdown)
    units = [f"{task} {unit}" for unit in ("ms", "MB") for task in tasks]
    return f"{accuracy}\n\n{table(['a step', *units], costs, 1, markdown)}"


def _accuracy(values: list[float]) -> str:
    """The mean of seeds in per cent, with half their range where there are several."""
    if not values:
        return "-"
    spread = 50 * (max(values) - min(values))
    return f"{100 * statistics.fmean(values):.1f}" + (f"±{spread:.1f}" if len(values) > 1 else "")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _smallest(values: list[float], unit: float) -> str:
    return f"{min(values) / unit:.0f}" if values else "-"


def settings(content: dict[str, Any]) -> Iterator[str]:
    """How long each task was trained, for its reader to judge the scores by."""
    for task in TASKS:
        rows = [row for row in content["rows"] if row["task"] == task]
        if not rows:
            continue
        setting = rows[0]["setting"]
        seeds = sorted({row["seed"] for row in rows})
        of = {name: setting[name] or "all" for name in ("train_samples", "val_samples")}
        yield (
            f"- {task}: {setting['steps']} steps of {setting['batch_size']} samples out of "
            f"{of['train_samples']}, up to {setting['length']} tokens, learning rate "
            f"{setting['lr']:g}, scored on {of['val_samples']}; "
            f"seeds {', '.join(map(str, seeds))}; "
            f"threads: {setting['threads']}; at most {max(row['minutes'] for row in rows):.1f} "
            f"minutes a run."
        )


def markdown(content: dict[str, Any]) -> str:
    return f"""\
# Long Range Arena

{provenance(content)}

{report(content, markdown=True)}

{chr(10).join(settings(content))}

Scores are of the last weights on held-out samples; ± is half the range of the seeds. The paper's
are of the whole benchmark, on far more steps: they are beside ours to be looked at, not to be
compared. Among ours all that differs within a task is the attention. Times are of runs that may
have had neighbours on the machine, so that `softmaxfree bench sequences` compares them better.
Memory is the largest of the process, libraries included.
"""
