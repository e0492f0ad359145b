"""The documentation: complete, its links alive, its examples running.

The site itself, with links inside of pages, is built by `make docs`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import alive
import pytest
import yaml
from publish import card

import softmaxfree
from softmaxfree.lab.results import Table, read
from softmaxfree.layers.registry import ATTENTIONS
from softmaxfree.models.variants import PUBLISHED

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
RESULTS = sorted((ROOT / "results").rglob("*.md"))
MARKDOWN = sorted([*ROOT.glob("*.md"), *PAGES, *RESULTS])


def links(path: Path) -> Iterator[Path]:
    """Files that a Markdown file links to; not those of other hosts."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not re.match(r"[a-z]+:|#", target):
            yield path.parent / target.partition("#")[0]


def in_nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from in_nav(part)


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_point_to_files(path: Path) -> None:
    missing = [str(target) for target in links(path) if not target.exists()]
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    nav = set(in_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    of_the_root = {path.name for path in ROOT.glob("*.md")}  # docs/site_hooks.py brings them in
    assert nav - of_the_root == {page.name for page in PAGES}


def test_every_result_is_linked_to_from_a_page() -> None:
    linked = {target.resolve() for page in PAGES for target in links(page)}
    assert not set(RESULTS) - linked


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_is_listed_with_its_score(path: Path) -> None:
    """In a line of its own, with the first number of its duration and the first of its score."""
    link = f"(../{path.relative_to(ROOT)})"
    (line,) = [line for line in (ROOT / "docs/recipes.md").read_text().splitlines() if link in line]
    for field in ("duration", "score"):
        header = re.search(rf"^# {field}: +(\d[\d.]*)", path.read_text(), re.MULTILINE)
        assert header is None or re.search(rf"\b{re.escape(header[1])}\b", line), (field, header)


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs/api.md").read_text()
    named = re.findall(r"^::: softmaxfree\.(\w+)$", reference, re.MULTILINE)
    assert sorted(named) == sorted(softmaxfree.__all__)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run_examples(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in python_blocks(page):
        exec(code, names)
    return names


def test_the_front_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_examples("README.md")
    sides = [tuple(features.shape[2:]) for features in names["maps"]]
    assert sides == [(63, 84), (32, 42), (16, 21), (8, 11)]
    assert names["y"].shape == (1, 100 * 133, 64)
    assert "multiply-adds" in capsys.readouterr().out


def test_the_front_page_has_the_scores_of_the_weights() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in PUBLISHED:
        assert f"| `{name}` | {100 * card(name)['accuracy']['all']:.1f} % |" in readme


def test_the_pages_of_models_run() -> None:
    assert run_examples("docs/backbones.md")["logits"].shape == (2, 10)
    assert run_examples("docs/weights.md")["model"].num_classes == 10


def test_the_quick_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_examples("docs/index.md")
    assert names["y"].shape == (2, 1000, 64)
    assert names["logits"].shape == (2, 10)
    assert names["out"].shape == names["v"].shape
    assert "attention 'softpp' in 2 layers" in capsys.readouterr().out


def test_every_example_of_attentions_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softmaxfree.layers.registry.ATTENTIONS", dict(ATTENTIONS))
    examples = python_blocks("docs/attentions.md")
    assert len(examples) == 3
    for code in examples:
        exec(code, {"__name__": "example"})


def test_the_table_of_switched_off_attentions_is_the_measured_one() -> None:
    _, table = alive.page(read(ROOT / "results/alive.json")).parts
    assert isinstance(table, Table)
    text = (ROOT / "docs/method.md").read_text()
    for _, *cells in table.rows:
        assert f"| {' | '.join(cells)}".rstrip(" |") in text


def test_the_page_of_figures_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="switched off"):
        assert run_examples("docs/figures.md")["rows"].shape == (2, 16, 16)
    assert "stages.0.blocks.0.attention" in capsys.readouterr().out


def test_the_method_in_a_few_lines_is_the_operation() -> None:
    assert run_examples("docs/method.md")["out"].shape == (784, 32)
