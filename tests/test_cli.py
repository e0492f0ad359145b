"""The command line, as a user meets it."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from softmaxfree.cli import main
from softmaxfree.errors import UserError
from softmaxfree.imports import needs
from softmaxfree.models.weights import find_weights


def softmaxfree(*words: str) -> subprocess.CompletedProcess[str]:
    """In this process: most commands take less time than importing torch."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(words))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "softmaxfree", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_without_arguments_it_shows_help() -> None:
    done = softmaxfree()
    assert done.returncode == 0
    assert "measure speed and memory" in done.stdout


@pytest.mark.slow
def test_it_runs_as_a_module() -> None:
    done = process("bench", "attention", "--threads", "0")
    assert done.returncode == 1
    assert done.stderr == "softmaxfree: error: --threads must be at least 1, got 0\n"


def test_help_teaches() -> None:
    done = softmaxfree("bench", "attention", "--help")
    assert done.returncode == 0
    assert "released formula" in done.stdout
    assert "Threads to compute with" in done.stdout


LIGHT = """
import sys
sys.argv = ["softmaxfree"]
from softmaxfree.cli import main
for words in WORDS:
    main(words)
print({"torch", "timm", "lightning", "matplotlib"} & set(sys.modules), file=sys.stderr)
"""


def test_help_the_version_and_the_list_of_models_import_nothing_heavy() -> None:
    from .help_texts import all_commands

    words = [[*command, "--help"] for command in all_commands()]
    words += [["--help"], ["bench", "--help"], ["--version"], ["models"]]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.replace("WORDS", repr(words))], capture_output=True, text=True
    )
    assert done.stderr == "set()\n"
    assert "softmaxfree 0." in done.stdout
    assert "softpp_tiny" in done.stdout


def test_an_error_is_one_line_without_a_traceback() -> None:
    done = softmaxfree("bench", "attention", "--threads", "0")
    assert done.returncode == 1
    assert done.stderr == "softmaxfree: error: --threads must be at least 1, got 0\n"


@pytest.mark.parametrize(
    "words",
    [
        ["figures", "heatmap", "--images", "[plain.png,caf\udce9.png]"],
        ["figures", "newton", "--images=[caf\udce9.png]"],
        ["predict", "plain.png", "--checkpoint", "caf\udce9.ckpt"],
        ["fit", "--out", "caf\udce9"],
        ["runs", "caf\udce9"],
    ],
    ids=" ".join,
)
def test_names_that_are_not_in_utf_8_are_refused_in_a_sentence(words: list[str]) -> None:
    """In values of options, which are read as YAML; `predict` takes images of any name."""
    done = softmaxfree(*words)
    assert done.returncode == 1
    assert done.stderr.startswith("softmaxfree: error: ")
    assert r"caf\udce9" in done.stderr
    assert "not in UTF-8, as the arguments of this command must be: rename" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_flag_shows_the_traceback() -> None:
    with pytest.raises(UserError, match="--threads must be at least 1, got 0"):
        softmaxfree("bench", "attention", "--threads", "0", "--traceback")


def test_unknown_options_are_refused() -> None:
    done = softmaxfree("bench", "attention", "--presett", "demo")
    assert done.returncode == 2
    assert "presett" in done.stderr
    assert "Traceback" not in done.stderr
    done = softmaxfree("bench", "attention", "--preset", "fast")
    assert done.returncode == 2
    assert "core" in done.stderr


def test_what_a_benchmark_cannot_do_is_said_before_the_work_starts(tmp_path: Path) -> None:
    for words, message in (
        (("--contestants", "[nope]"), "unknown contestant 'nope'; choose among soft, softpp"),
        (("--against", "nowhere.json"), "nowhere.json"),
        (("--modules", "[no_such_module]"), "there is no module no_such_module"),
    ):
        done = softmaxfree("bench", "attention", "--out", str(tmp_path), *words)
        assert done.returncode == 1
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    if not torch.cuda.is_available():
        done = softmaxfree("bench", "memory", "--device", "cuda")
        assert "torch finds no GPU; use --device cpu" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named() -> None:
    sentence = r"a figure needs no_such.*pip install 'softmaxfree\[plots\]'"
    with pytest.raises(UserError, match=sentence), needs("plots", "a figure"):
        import no_such  # noqa: F401


def test_a_command_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "softmaxfree.training.runs", raising=False)
    monkeypatch.setitem(sys.modules, "tabulate", None)
    done = softmaxfree("runs", "folder")
    assert done.returncode == 1
    assert done.stderr == (
        "softmaxfree: error: softmaxfree runs needs tabulate; "
        "install it with: pip install 'softmaxfree[train]'\n"
    )


@pytest.mark.slow
def test_a_missing_extra_is_named_before_the_work_starts(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None; "
        "from softmaxfree.cli import main; main(['bench', 'attention', '--out', 'nowhere'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr == (
        "softmaxfree: error: pictures need matplotlib; "
        "install it with: pip install 'softmaxfree[plots]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_models_lists_every_backbone_beside_the_papers_figures() -> None:
    """From what was counted once; the smallest is counted again."""
    from softmaxfree.lab.bench import family

    done = softmaxfree("models")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert re.search(r"^softpp_nano +auto +cifar10 +1\.18 ", done.stdout, re.M)
    rows = json.loads((RESULTS / "models.json").read_text())["rows"]
    variants = family._variants()
    assert [(row["model"], row["arguments"]) for row in rows] == [row[:2] for row in variants]
    assert rows[0] == family._row(*variants[0])
    (softx,) = [row for row in rows if row["model"] == "softx_nano"]
    assert softx == family._row("softx_nano", {}, {})
    assert softx["inverse"] == "none"
    found = {row["model"]: row for row in rows if not row["arguments"]}
    assert set(found) == set(timm.list_models("soft*"))
    for name, millions in {"tiny": 1.94, "small": 6.40, "medium": 7.40, "large": 11.25}.items():
        assert bare(found[f"soft_{name}_fudan"]) == pytest.approx(millions, rel=0.015)
    for name, millions in {"tiny": 2.58, "small": 4.44, "medium": 8.79, "large": 15.24}.items():
        assert bare(found[f"softpp_{name}"]) == pytest.approx(millions, rel=0.015)
        assert bare(found[f"softx_{name}"]) == pytest.approx(millions, rel=0.02)
    for row in rows:
        if row["arguments"] and row["paper_parameters_m"]:
            assert round(row["parameters"] / 1e6, 2) == row["paper_parameters_m"]


@pytest.mark.slow
def test_models_are_counted_again_where_a_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from softmaxfree.lab.bench import family

    small = [row for row in family._variants() if row[0] in ("soft_nano", "softpp_tiny")]
    monkeypatch.setattr(family, "_variants", lambda: small)
    done = softmaxfree("models", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    counted = json.loads((tmp_path / "models.json").read_text())["rows"]
    rows = json.loads((RESULTS / "models.json").read_text())["rows"]
    assert [row for row in rows if row in counted] == counted
    assert len(counted) == 2
    assert "softpp_tiny" in (tmp_path / "models.md").read_text()
    for row in rows:
        with torch.device("meta"):
            model = timm.create_model(row["model"], **row["arguments"])
        assert sum(parameter.numel() for parameter in model.parameters()) == row["parameters"]
        assert list(model.default_cfg["input_size"]) == row["input_size"]


def bare(row: dict[str, float]) -> float:
    """G multiply-adds without the inverses."""
    return (row["multiply_adds"] - row["inverse_multiply_adds"]) / 1e9


def test_convert_says_what_it_found(tmp_path: Path) -> None:
    source, target = tmp_path / "in.pth", tmp_path / "out.safetensors"
    model = timm.create_model("softpp_nano", num_classes=10)
    torch.save({"state_dict": model.state_dict()}, source)
    done = softmaxfree("convert", str(source), str(target), "--attention", "softpp")
    assert done.returncode == 0, done.stderr
    assert "that is softpp_nano" in done.stdout
    assert "depths: (1, 1, 2, 1)" in done.stdout
    call = done.stdout.splitlines()[-1].strip()
    loaded = eval(call, {"timm": timm})
    assert torch.equal(loaded.head.weight, model.head.weight)


def test_convert_refuses_a_broken_file_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "in.pth").write_bytes(b"PK\x03\x04 not a checkpoint")
    done = softmaxfree("convert", str(tmp_path / "in.pth"), str(tmp_path / "out.safetensors"))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "in.pth cannot be read as weights" in done.stderr


RESULTS = Path(__file__).parents[1] / "results"


@pytest.mark.slow
def test_export_to_onnx_is_checked_at_other_sizes(tmp_path: Path) -> None:
    """With trained weights, and at sizes that no window divides."""
    model, target = (
        timm.create_model("softpp_nano.cifar10", pretrained=True),
        tmp_path / "nano.onnx",
    )
    done = softmaxfree("export", "softpp_nano.cifar10", str(target))
    assert done.returncode == 0, done.stderr
    for size in ("  32 x 32:", "64 x 32", "32 x 48", "49 x 75"):
        assert size in done.stdout
    assert done.stdout.count("the same class for each image") == 4
    assert "the check says little" not in done.stdout
    import onnxruntime

    session = onnxruntime.InferenceSession(target)
    for sides in ((49, 75), (55, 70), (33, 101)):
        images = torch.randn(3, 3, *sides, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = model.eval()(images)
        assert (expected[0] - expected[1]).abs().max() > 0.1
        (logits,) = session.run(None, {"images": images.numpy()})
        error = (torch.from_numpy(logits) - expected).abs().max() / expected.abs().max()
        assert error < 5e-4


def test_a_wrong_export_is_found_and_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On purpose: the windows at the right and bottom edge are cut off."""
    from softmaxfree import deploy
    from softmaxfree.layers import samplers

    def open_cut_off(path: Path) -> Any:
        model = find_weights("softpp_nano.cifar10").build()

        def run(images: torch.Tensor) -> torch.Tensor:
            with pytest.MonkeyPatch.context() as wrong, torch.no_grad():
                wrong.setattr(samplers, "ceil_div", lambda count, divisor: count // divisor)
                return model(images)

        return run

    monkeypatch.setattr(deploy, "export", lambda model, path, size: path.write_bytes(b"a graph"))
    monkeypatch.setattr(deploy, "open_exported", open_cut_off)
    target = tmp_path / "nano.pt2"
    with pytest.raises(RuntimeError, match=r"does not compute what softpp_nano.cifar10 computes"):
        main(["export", "softpp_nano.cifar10", str(target)])
    assert list(tmp_path.iterdir()) == []
    first = next(line for line in capsys.readouterr().out.splitlines() if " x " in line)
    assert first.startswith("  32 x 32: ")  # as in training


def test_weights_that_tell_no_images_apart_are_noticed() -> None:
    """A comparison of logits says little then, and the command says so."""
    from softmaxfree.deploy import _real_images, alike

    weights = find_weights("softpp_nano.cifar10")
    images, model = _real_images(weights.preparation, (32, 48), 3), weights.build()
    assert not alike(model, images)
    torch.nn.init.zeros_(model.head.weight)
    assert alike(model, images)


def test_export_knows_the_names() -> None:
    done = softmaxfree("export", "softpp_tinny", "model.onnx")
    assert done.returncode == 1
    assert "there are no weights softpp_tinny: did you mean softpp_tiny" in done.stderr
    done = softmaxfree("export", "softpp_nano", "model.pth")
    assert done.returncode == 1
    assert "must end in .onnx or .pt2, got model.pth" in done.stderr
    done = softmaxfree("export", "softpp_nano.cifar10", "nowhere/model.pt2")
    assert done.returncode == 1
    assert "there is no folder nowhere to write to: create it first" in done.stderr
    assert not Path("nowhere").exists()
