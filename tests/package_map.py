"""The map of the package in CONTRIBUTING.md: parts, lines, and which part imports which.

    python -m tests.package_map

writes it anew; `tests/test_package.py` fails where it is out of date.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/softmaxfree"
PAGE = ROOT / "CONTRIBUTING.md"
LIBRARY = ("ops", "layers", "models", "analysis", "data", "tasks", "training")
LABORATORY = ("lab.bench", "lab.figures", "lab.reproduce", "lab.explore")
BLOCK = re.compile(r"(<!-- map -->\n).*?(<!-- end of map -->)", re.DOTALL)


def modules(path: Path) -> set[str]:
    """The modules of this package that a file imports, such as `ops.kernel`."""
    place = path.relative_to(SOURCE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            package = place[: len(place) - node.level]
            found.add(".".join([*package, *filter(None, [node.module])]))
        elif (node.module or "").startswith("softmaxfree."):
            found.add(node.module.removeprefix("softmaxfree."))
    return found - {""}


def part_of(module: str) -> str:
    """The part of the map that a module belongs to: a package, the lab's floor, or the rest."""
    words = module.split(".")
    if words[0] in LIBRARY:
        return words[0]
    if words[0] == "lab":
        name = ".".join(words[:2])
        return name if name in LABORATORY else "lab"
    return "top level"


def parts() -> tuple[dict[str, int], dict[str, set[str]]]:
    """Lines of each part, and the other parts that it imports from."""
    lines: dict[str, int] = defaultdict(int)
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        part = part_of(module)
        lines[part] += len(path.read_text().splitlines())
        if module not in ("cli", "__init__", "__main__"):
            arrows[part] |= {part_of(found) for found in modules(path)} - {part, "top level"}
    return lines, arrows


def written() -> str:
    """The map as a table: every part imports only from parts above it."""
    lines, arrows = parts()
    order = ("top level", *LIBRARY, "lab", *LABORATORY)
    total = sum(lines.values())
    laboratory = sum(count for part, count in lines.items() if part.startswith("lab"))
    rows = "".join(
        f"| `{part}` | {round(lines[part], -2):,} | "
        f"{', '.join(name for name in order if name in arrows[part]) or 'none'} |\n"
        for part in order
    )
    return (
        "| part | lines | imports from |\n| :-- | --: | :-- |\n"
        f"{rows}| laboratory | {round(laboratory, -2):,} | |\n"
        f"| all | {round(total, -2):,} | |\n"
    )


def block(page: str) -> str:
    """The map as it stands in the page."""
    found = BLOCK.search(page)
    assert found, "CONTRIBUTING.md has lost the marks around its map"
    return found[0].split("\n", 1)[1].rsplit("<!--", 1)[0]


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda found: found[1] + written() + found[2], PAGE.read_text()))
