"""`softmaxfree doctor` and `softmaxfree build`, as a user meets them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from softmaxfree import cli
from softmaxfree.lab.bench import doctor


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MODEL", "softpp_nano")
    monkeypatch.setattr(doctor, "IMAGES", (1, 3, 32, 32))


@pytest.mark.slow
def test_it_tells_what_is_best_and_how_to_set_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    cli.main(["doctor", "--out", str(tmp_path)])
    assert torch.get_num_threads() == threads
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown
    assert "cpu, torch" in shown
    assert "right" in shown
    assert "compiled code: not built" in shown
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["errors"]["cpu, torch"] < 1e-5
    assert "1" in found["threads_s"]
    lines = shown[shown.index("    trainer:") : shown.index("\nwritten")]
    config = yaml.safe_load(lines)
    assert config["trainer"]["accelerator"] in ("cpu", "gpu")
    assert config["trainer"]["precision"] in ("32-true", "bf16-mixed")
    assert config["model"]["init_args"]["options"] == {"inverse": "auto"}
    (tmp_path / "machine.yaml").write_text(lines)
    call = [sys.executable, "-m", "softmaxfree", "fit", "--config", str(tmp_path / "machine.yaml")]
    done = subprocess.run([*call, "--print_config"], capture_output=True, text=True)
    assert "inverse: auto" in done.stdout, done.stderr


@pytest.mark.usefixtures("compiled")
def test_the_compiled_code_is_tested_too(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.doctor()
    shown = capsys.readouterr().out
    assert "cpu, compiled" in shown
    assert "native-" in shown


def test_wrong_numbers_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = doctor.softmax_free_attention

    def slightly_wrong(*tensors: torch.Tensor) -> torch.Tensor:
        out = right(*tensors)
        return out if out.dtype == torch.float64 else out * 1.001

    monkeypatch.setattr(doctor, "softmax_free_attention", slightly_wrong)
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor"])
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert "WRONG" in shown.out
    assert "the self-test failed" in shown.err


@pytest.mark.slow
def test_build_is_one_command(cache_with_library: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    call = [sys.executable, "-m", "softmaxfree", "build"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=True)
    (library,) = (tmp_path / "softmaxfree").iterdir()
    assert done.stdout == f"written: {library}\n"
    assert library.name == next((cache_with_library / "softmaxfree").iterdir()).name
