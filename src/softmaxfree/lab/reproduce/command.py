"""`softmaxfree reproduce`: trains what is missing, judges claims, writes tables."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...environment import command_line
from ..bench.trained import train_all
from ..results import provenance, result, table, write
from .contestants import SEEDS, SIZES, ContestantRun, contestant_runs
from .costs import BATCH, costs
from .experiments import EXPERIMENTS, Experiment
from .measured import MEASURED, measured_runs
from .picture import draw_dots
from .verdicts import Verdict, judge

TITLES = {name: one.title for name, one in EXPERIMENTS.items()} | {
    name: title for name, (title, _) in MEASURED.items()
}
"""Of all experiments, by the names on the command line."""
CLAIM_HEADER = ["claim", "paper", "here", "difference", "smallest", "verdict"]


def run(
    names: Sequence[str],
    workers: int,
    threads: int,
    runs: Path,
    out: Path,
    seeds: Sequence[int] = SEEDS,
    arguments: Sequence[str] = (),
) -> None:
    """Experiments one after the other; what has been trained before is not trained again."""
    for name in names:
        if name in MEASURED:
            # The weights are needed, also where a record says what they scored.
            train_all(measured_runs(runs, arguments, seeds), workers, threads, name)
            measure(name, runs, out, seeds)
        else:
            reproduce(name, workers, threads, runs, out, seeds, arguments)


def measure(name: str, runs: Path, out: Path, seeds: Sequence[int]) -> None:
    """Measures what a claim is about, and writes OUT/NAME.*."""
    title, function = MEASURED[name]
    found = function(runs, seeds)
    told = {"report": found.report, "verdict": found.verdict}
    content = result(command_line(), found.rows, experiment=name, **told)
    claim = (function.__doc__ or "").strip()
    text = (
        f"# {title}\n\n{provenance(content)}\n\n{claim} {found.verdict}\n\n"
        f"```text\n{found.report}\n```\n"
    )
    write(out / name, content, text)
    draw_dots(found.dots, title, found.quantity, out / f"{name}.png", log=found.log)
    print(f"{title}\n\n{found.report}\n\n{found.verdict}\n\nwritten: {out / name}.*\n")


def reproduce(
    name: str,
    workers: int,
    threads: int,
    runs: Path,
    out: Path,
    seeds: Sequence[int],
    arguments: Sequence[str],
) -> dict[str, Any]:
    """Trains the contestants of an experiment, scores them, and writes OUT/NAME.*."""
    experiment = EXPERIMENTS[name]
    trained = {
        contestant: contestant_runs(contestant, runs, out / "runs", arguments, seeds)
        for contestant in experiment.contestants
    }
    # Seed by seed, so that a command that is stopped has compared something.
    in_turn = [of_seed for seed in zip(*trained.values()) for of_seed in seed]
    train_all(in_turn, workers, threads, name)
    rows = [row(contestant, run) for contestant, its_runs in trained.items() for run in its_runs]
    claims, cost = judged(experiment, rows), costs(experiment.contestants)
    content = result(command_line(), rows, experiment=name, claims=claims, costs=cost)
    write(out / name, content, markdown(experiment, content))
    score = experiment.claims[-1].score
    quantity = f"accuracy{_at(score)} (%)"
    draw_dots(scores_of(rows, score), experiment.title, quantity, out / f"{name}.png")
    print(f"{experiment.title}\n\n{report(experiment, content)}\n\nwritten: {out / name}.*\n")
    return content


def row(contestant: str, run: ContestantRun) -> dict[str, Any]:
    """A run's scores and cost."""
    told = run.told()
    accuracy = told["scores"]["accuracy"]
    return {
        "contestant": contestant,
        "seed": int(run.folder.name.rpartition("-")[2]),
        **{f"accuracy@{size}": value for size, value in accuracy.items()},
        "minutes": told.get("seconds", 0) / 60,
        "step_s": told.get("seconds_per_step"),
        "peak_bytes": told.get("peak_bytes"),
        "diverged": "diverged" in told,
        "command": told["command"],
        "commit": told["commit"],
    }


def scores_of(rows: Sequence[dict[str, Any]], score: str) -> dict[str, list[float]]:
    """In per cent, of each contestant that has it, one for each seed."""
    found: dict[str, list[float]] = {}
    for one in rows:
        if score in one:
            found.setdefault(one["contestant"], []).append(100 * one[score])
    return found


def judged(experiment: Experiment, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each claim with its verdict."""
    claims = []
    for claim in experiment.claims:
        scores = scores_of(rows, claim.score)
        verdict: Verdict = judge(scores, claim.higher, claim.lower)
        means = [statistics.fmean(scores[name]) for name in (claim.higher, claim.lower)]
        told = {"means": means, "verdict": verdict.word, **verdict._asdict()}
        claims.append(claim._asdict() | told)
    return claims


def report(experiment: Experiment, content: dict[str, Any], markdown: bool = False) -> str:
    """Scores and cost of the contestants, then the claims."""
    rows = content["rows"]
    scores = list(dict.fromkeys(["accuracy@32", *(claim.score for claim in experiment.claims)]))
    lines = []
    for name in experiment.contestants:
        own = [one for one in rows if one["contestant"] == name]
        cost = content["costs"][name]
        lines.append(
            [
                name,
                *(_mean(scores_of(own, score).get(name, [])) for score in scores),
                f"{cost['multiply_adds'] / 1e6:.1f}",
                f"{cost['image_bytes'] / 1e6:.2f}",
                f"{cost['images_per_second']:.0f}",
                str(sum(one["diverged"] for one in own) or "-"),
            ]
        )
    claims = [claim_cells(claim) for claim in content["claims"]]
    columns = ["accuracy, %", *(score.replace("accuracy@", "at ") for score in scores[1:])]
    columns += ["M mult-adds", "MB", "images/s", "diverged"]
    first = table(["contestant", *columns], lines, 1, markdown)
    return f"{first}\n\n{table(CLAIM_HEADER, claims, 3, markdown)}"


def claim_cells(claim: dict[str, Any]) -> list[str]:
    """A claim with its verdict as a line of a table."""
    return [
        f"{claim['higher']} > {claim['lower']}" + _at(claim["score"]),
        claim["paper"],
        "{:.1f} over {:.1f}".format(*claim["means"]),
        f"{claim['difference']:+.1f}",
        f"{claim['smallest']:.1f}",
        claim["verdict"],
    ]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{deviation}"


def _at(score: str) -> str:
    size = score.partition("@")[2]
    return f" at {size} pixels" if size != SIZES[0] else ""


def markdown(experiment: Experiment, content: dict[str, Any]) -> str:
    seeds = sorted({one["seed"] for one in content["rows"]})
    return f"""\
# {experiment.title}

{provenance(content)}

{report(experiment, content, markdown=True)}

softpp_nano (1 M parameters) with what the contestant's name says, trained on CIFAR-10 for 400 steps
of 128 images from random weights, recipes/reproduction/cifar10.yaml; seeds {seeds}. ± is the
standard deviation over seeds. A claim is held or not held where the difference of the means, in
points, is at least the smallest that these runs could have shown: Student's t at 95 %, with the
spread of all contestants of the table. Multiply-adds are of one image with the inverses, MB what
training keeps of it for the backward pass, images/s forward and backward passes of {BATCH} images,
in turns in one run.
"""
