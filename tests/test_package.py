"""The package as a whole: what it exports, what it imports, what depends on what."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import softmaxfree

from . import package_map

SOURCE = Path(softmaxfree.__file__).parent
ORDER = [
    "threads",
    "words",
    "errors",
    "usage",
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


PRIVATE = {
    # timm has no public name for these.
    "_checkpoint_connector": "whether a checkpoint is being restored: an error then is the file's",
    "_loaded_checkpoint": "the same",
    "_logger_connector": "writes a step's metrics before its checkpoint, not after it",
    "FeatureGetterNet": "the class of models with features_only, which is taken apart",
    "feature_take_indices": "counts maps from the end as timm does",
    # torchvision
    "_skip_resize": "the data module resizes images before they are padded to a batch",
    # Lightning: its loops are private, and a run is resumed inside of them.
    "_FitLoop": "the loop over the epochs, which RunLoop extends",
    "_Progress": "the counters of a loop",
    "_ProcessedTracker": "one of those counters",
    "_batches_that_stepped": "the step that is logged",
    "_data_fetcher": "whether a batch is the last of its epoch",
    "_has_run": "whether a validation is awaited",
    "_num_ready_batches_reached": "whether an epoch is over",
    "_should_accumulate": "whether gradients wait for their step",
    "_should_check_val_fx": "whether a validation is due",
    "_average_model": "the averaged weights, for buffers that are not averaged",
    # torch
    "_C": "finds out whether torch is tracing",
    "_len_torch_dispatch_stack": "the same",
    "_linalg_eigh": "an operator to count the cost of",
    "_scaled_dot_product_flash_attention_for_cpu": "the same",
    "_get_iterator": "keeps hold of a loader's workers, to end them",
    "_shutdown_workers": "ends them, where Python would wait for ever",
    "_foreach_copy_": "copies many tensors at once; Lightning's own average uses it too",
    "_foreach_lerp_": "the same",
    "_has_any_global_hook": "a module with hooks is called, not fused",
    "_forward_hooks": "the same",
    "_forward_pre_hooks": "the same",
    "_backward_hooks": "the same",
    "_backward_pre_hooks": "the same",
    # Python: documented, in spite of the underscore.
    "_asdict": "a method of named tuples",
    "_replace": "a method of named tuples",
    "_exit": "ends a forked process at once",
}
"""Every private name of another package that this one uses, and what for."""


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
    names: dict[str, Any] = {}
    try:
        for code in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL):
            block: dict[str, Any] = {"__name__": "guide"}  # each runs on its own, as in a file
            exec(code, block)
            names |= block
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
    assert listed == set(ATTENTIONS)


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


def test_the_map_in_contributing_is_up_to_date() -> None:
    """Which part imports which to the letter, lines to a tenth."""

    def rows(table: str) -> dict[str, list[str]]:
        lines = [line.split("|")[1:-1] for line in table.splitlines()[2:]]
        return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}

    shown, now = rows(package_map.block(package_map.PAGE.read_text())), rows(package_map.written())
    assert shown.keys() == now.keys()
    for name, (lines, arrows) in now.items():
        assert shown[name][1] == arrows, name
        before, after = (float(text.replace(",", "")) for text in (shown[name][0], lines))
        assert abs(after - before) <= 100 + 0.1 * before, name
        assert "lab" in name or "lab" not in arrows


def test_private_names_of_other_packages_are_listed() -> None:
    """They may change in any release: each needs a reason, and one place to look it up."""
    used: set[str] = set()
    own: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    used |= {name} if is_private(name) else set()
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    all_of_it = any(map(is_private, module.split(".")))
                    used |= {n.name for n in names if all_of_it or is_private(n.name)}
    assert used - own <= set(PRIVATE)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.slow
def test_the_import_is_light() -> None:
    """No plotting, no command line, no data: torch, timm and what they bring."""
    script = "import sys, softmaxfree; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    heavy = {"matplotlib", "jsonargparse", "lightning", "onnx", "pandas", "scipy", "transformers"}
    assert not heavy & set(done.stdout.split())
