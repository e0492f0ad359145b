"""The package as a whole: what it exports, what it imports, what depends on what."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import softmaxfree

SOURCE = Path(softmaxfree.__file__).parent
ORDER = [
    "threads",
    "errors",
    "files",
    "checkpoint_files",
    "imports",
    "environment",
    "ops",
    "layers",
    "testing",
    "allow_list",
    "trust",
    "models",
    "analysis",
    "data",
    "tasks",
    "deploy",
    "training",
    "lab",
    "cli",
]
"""Each may import from those before it, and from itself."""


def test_public_names_are_pinned() -> None:
    assert softmaxfree.__all__ == [
        "MultiHeadAttention",
        "SoftmaxFreeAttention",
        "SoftmaxFreeTransformer",
        "SoftmaxFreeViT",
        "attention_rows",
        "diagnose",
        "gaussian_attention",
        "gaussian_kernel",
        "pinv",
        "recorded_attention",
        "register_attention",
        "replace_attention",
        "softmax_free_attention",
        "tie_qk",
    ]
    for name in softmaxfree.__all__:
        assert getattr(softmaxfree, name).__doc__


def test_the_guide_to_attentions_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from softmaxfree.layers.registry import ATTENTIONS

    guide = Path(__file__).parents[1] / "docs/attentions.md"
    names: dict[str, Any] = {"__name__": "guide"}
    try:
        for code in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL):
            exec(code, names)
        battery = names["TestElu"]()
        tests = [name for name in dir(battery) if name.startswith("test_")]
        assert len(tests) > 12
        for name in tests:
            getattr(battery, name)()
    finally:
        ATTENTIONS.pop("elu", None)
    assert names["logits"].shape == (1, 1000)
    assert "multiply-adds" in capsys.readouterr().out
    table = set(re.findall(r"^\| (`.*?`) \|", guide.read_text(), re.MULTILINE))
    listed = set(re.findall(r"`(\w+)`", " ".join(table)))
    assert listed == {name for name in ATTENTIONS if name != "released"}


def imported_parts(path: Path) -> set[str]:
    """The parts of the package that a file imports from."""
    place = path.relative_to(SOURCE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = [*place[: len(place) - node.level], *(node.module or "").split(".")]
            found.add(target[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("softmaxfree."):
            found.add(node.module.split(".")[1])
    return found - {""}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_no_arrow_points_back(path: Path) -> None:
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part in ("__init__", "__main__"):
        return
    assert part in ORDER, f"{part} has no place in the order {ORDER}"
    later = set(ORDER[ORDER.index(part) + 1 :])
    assert not imported_parts(path) & later


@pytest.mark.slow
def test_the_import_is_light() -> None:
    """No plotting, no command line, no data: torch, timm and what they bring."""
    script = "import sys, softmaxfree; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    heavy = {"matplotlib", "jsonargparse", "lightning", "onnx", "pandas", "scipy", "transformers"}
    assert not heavy & set(done.stdout.split())
