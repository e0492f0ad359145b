"""`softmaxfree figures newton`: residuals of known matrices, and the files it writes."""

import csv
from pathlib import Path

import pytest
import torch

from softmaxfree.cli import main
from softmaxfree.lab.figures import newton
from softmaxfree.lab.figures.subject import given_images, subjects

from .conftest import WriteCheckpoint


def test_a_diagonal_matrix_follows_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """After k steps from alpha A, 1 - s X is (1 - alpha s^2)^(2^k) of an eigenvalue s."""
    eigenvalues = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    a = torch.diag(eigenvalues).unsqueeze(0)
    monkeypatch.setattr(newton, "MOST_STEPS", 6)
    found = {curve.method: curve for curve in newton.curves({"stage 1": a})}
    alpha = 1.8  # by |A|_1 = 1
    for steps, value in enumerate(found["newton"].mean, 1):
        left = eigenvalues * (1 - alpha * eigenvalues**2) ** (2**steps)
        assert value == pytest.approx((left.norm() / eigenvalues.norm()).item(), rel=1e-9)
    assert found["exact"].steps == found["cholesky"].steps == 1
    assert found["paper"].mean[-1] > 0.5  # |A|_1 is an eigenvalue: the paper's own start loses it
    assert found["paper"].steps is None


def test_enough_steps_are_those_from_which_on_it_stays_small() -> None:
    curve = newton.Curve("stage 1", "newton", [1e-4, 0.1, 1e-3, 1e-5], [], [])
    assert curve.steps == 3
    assert newton.Curve("stage 1", "newton", [0.1, float("nan")], [], []).steps is None


def test_the_matrices_are_those_of_all_layers_and_heads_by_stage() -> None:
    (subject,) = subjects(None, embedded=["softpp"])
    images = given_images(None, 2)
    found = newton.landmark_matrices(subject, images.values())
    records = subject.record(next(iter(images.values())))
    assert [*found] == ["stage 1", "stage 2", "stage 3", "stage 4"]
    heads = {"stage 1": 2, "stage 2": 4, "stage 3": 16, "stage 4": 10}  # stage 3 has two layers
    assert {stage: len(a) for stage, a in found.items()} == {s: 2 * n for s, n in heads.items()}
    first = records["stages.0.blocks.0.attention"].factors().A[0].double()
    torch.testing.assert_close(found["stage 1"][:2], first)
    assert newton.stage_of("blocks.3.attn") == "all layers"


def test_the_command_draws_writes_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(newton, "IMAGES", 1)
    monkeypatch.setattr(newton, "MOST_STEPS", 4)
    main(["figures", "newton", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert "backtrack" in told
    assert "stage 4" in told
    rows = list(csv.DictReader((tmp_path / "newton.csv").read_text().splitlines()))
    assert len(rows) == 4 * len(newton.METHODS) * newton.MOST_STEPS
    assert all(float(row["lowest"]) <= float(row["mean"]) <= float(row["highest"]) for row in rows)
    assert (tmp_path / "newton.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "newton.svg").read_text()


def test_models_that_invert_nothing_are_refused(write_checkpoint: WriteCheckpoint) -> None:
    softmax, softx = subjects(None, embedded=["softmax"]) + subjects([write_checkpoint("softx")])
    for subject in (softmax, softx):
        sentence = f"{subject.title} has no landmark matrices to invert; give the checkpoint"
        with pytest.raises(ValueError, match=sentence):
            newton.landmark_matrices(subject, given_images(None, 1).values())
    assert softx.title == softx.attention == "softx"
