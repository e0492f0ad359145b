"""All files of the fuzzer, 100,000 cases in total, and a report of what they came to.

    python -m tests.fuzz.report [--cases 100000] [--out results]

writes fuzz.json and fuzz.md: how many were tried, refused, finite, and percentiles of the relative
error against float64 by magnitude. Ends with status 1 where a test failed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from softmaxfree.files import write_atomically
from softmaxfree.lab.results import result

HERE = Path(__file__).parent
SHARES = {"test_tokens.py": 12, "test_matrices.py": 24, "test_checkpoints.py": 0.5}
"""Cases of a test, relative to those of a file that is not named here. Matrices are quick; each
checkpoint is given to a command."""
DRAWING = {
    "test_annotations.py": 4,
    "test_checkpoints.py": 1,
    "test_images.py": 2,
    "test_matrices.py": 1.3,
    "test_tokens.py": 3,
}
"""How many tests of a file draw cases; in the second of matrices a third of them apply."""

PERCENTILES = (50.0, 99.0, 99.9, 100.0)
MAGNITUDES = (1e-3, 1.0, 1e1, 1e2, 1e4, 1e6, 1e8)

Row = dict[str, Any]


def run(file: Path, cases: int, records: Path) -> tuple[int, bool]:
    """How many cases of a file were tried, and whether all passed."""
    before = len(records.read_text().splitlines())
    environment = os.environ | {
        "SOFTMAXFREE_FUZZ_CASES": str(cases),
        "SOFTMAXFREE_FUZZ_RECORDS": str(records),
    }
    call = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", str(file)]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-5000:], done.stderr[-2000:], sep="\n")
    return len(records.read_text().splitlines()) - before, done.returncode == 0


def percentile(values: list[float], share: float) -> float:
    """The smallest value that this share, in per cent, of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def summaries(rows: Iterable[Row]) -> list[Row]:
    """A row for each kind, type and magnitude; another for outliers a million spreads away."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        magnitude = row.get("magnitude")
        bound = next((b for b in MAGNITUDES if (magnitude or 0) <= b), None)
        label = "any" if magnitude is None else f"to {bound:g}" if bound else "beyond"
        groups[row["kind"], row["dtype"], label].append(row)
        if row.get("outliers") == 1e6:
            groups[row["kind"], row["dtype"], "outliers of 1e6 spreads"].append(row)
    found = []
    for (kind, dtype, label), members in sorted(groups.items()):
        errors = [row["error"] for row in members if "error" in row]
        found.append(
            {
                "kind": kind,
                "type": dtype,
                "magnitude": label,
                "tried": len(members),
                "refused": sum(row.get("refused", False) for row in members),
                "not finite": sum(not row.get("finite", True) for row in members),
                **{f"{p:g} %": percentile(errors, p) for p in PERCENTILES if errors},
            }
        )
    return found


def markdown(content: dict[str, Any]) -> str:
    files = "".join(
        f"| {row['file']} | {row['cases']:,} | {'passed' if row['passed'] else 'failed'} |\n"
        for row in content["files"]
    )
    names = ["kind", "type", "magnitude", "tried", "refused", "not finite"]
    shares = [f"{p:g} %" for p in PERCENTILES]
    table = "".join(
        f"| {' | '.join(str(row[name]) for name in names)} | "
        + " | ".join(f"{row[share]:.1e}" if share in row else "" for share in shares)
        + " |\n"
        for row in content["rows"]
    )
    return (
        "# What the fuzzer tried\n\n"
        f"`{content['command']}`, {content['cases']:,} cases, commit {content['commit'][:9]}, "
        f"torch {content['versions']['torch']}.\n\n"
        f"| file | cases | |\n| :-- | --: | :-- |\n{files}\n"
        "Percentiles of the relative error: of results against float64 (tokens, inverse), against "
        "the same sample alone (batch-mates) and without what is dropped (dropped). Magnitude is "
        "that of the largest landmark or entry.\n\n"
        f"| {' | '.join([*names, *shares])} |\n"
        f"| {' | '.join([':--'] * 3 + ['--:'] * (len(names) + len(shares) - 3))} |\n{table}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    files = sorted(HERE.glob("test_*.py"))
    weights = [DRAWING[file.name] * SHARES.get(file.name, 1) for file in files]
    done = []
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        records.touch()
        for file in files:
            each = math.ceil(options.cases * SHARES.get(file.name, 1) / sum(weights))
            cases, passed = run(file, each, records)
            done.append({"file": file.name, "cases": cases, "passed": passed})
            print(f"{file.name}: {cases} cases, {'passed' if passed else 'failed'}", flush=True)
        rows = summaries(map(json.loads, records.read_text().splitlines()))
    total = sum(row["cases"] for row in done)
    command = f"python -m tests.fuzz.report --cases {options.cases}"
    content = result(command, rows, files=done, cases=total)
    write_atomically(options.out / "fuzz.json", json.dumps(content, indent=1) + "\n")
    write_atomically(options.out / "fuzz.md", markdown(content))
    return 0 if all(row["passed"] for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
