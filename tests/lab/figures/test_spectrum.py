"""`softmaxfree figures spectrum`: norms of known matrices, their growth, and the files."""

import csv
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

from softmaxfree.cli import main
from softmaxfree.lab.figures import spectrum
from softmaxfree.lab.figures.subject import given_images, subjects
from softmaxfree.ops.kernel import kernel_matrix

from .conftest import WriteCheckpoint


def test_the_matrix_is_the_layers_own_at_the_size_that_has_so_many_tokens() -> None:
    (subject,) = subjects(None, embedded=["softpp"])
    (image,) = given_images(None, 1).values()
    a = spectrum.landmark_matrix(subject, image, side=7)
    assert a.shape == (2, 49, 49)
    own = subject.record(image, 56)["stages.0.blocks.0.attention"].factors().A[0]
    torch.testing.assert_close(a, own.double(), atol=1e-6, rtol=0)


def test_small_eigenvalues_are_the_kernels_and_not_rounding() -> None:
    """The Gaussian kernel of distinct tokens is positive definite; in float32 it is not."""
    (subject,) = subjects(None, embedded=["softpp"])
    image = list(given_images(None, 2).values())[1]
    a = spectrum.landmark_matrix(subject, image, side=14)
    own = subject.record(image, 112)["stages.0.blocks.0.attention"].factors().A[0].double()
    assert torch.linalg.eigvalsh(own).min() < -1e-8
    assert torch.linalg.eigvalsh(a).min() > 1e-9
    assert all(row["full_rank"] for row in spectrum.measured("image", [a]))


def test_norms_are_those_of_the_matrices() -> None:
    a = kernel_matrix(3 * torch.randn(2, 9, 8, dtype=torch.float64))
    root = a.sum(-1).rsqrt()
    inverse = torch.linalg.inv(a)
    normalised = root.unsqueeze(-1) * inverse * root.unsqueeze(-2)
    rows = [row for row in spectrum.measured("image", [a]) if row["inverse"] == "exact"]
    for row, x, z, one in zip(rows, inverse, normalised, a):
        assert row["full_rank"]
        assert row["m"] == 9
        expected = [torch.linalg.matrix_norm(y, 2).item() for y in (x, z, one, one @ z @ one)]
        assert [row[name] for name in spectrum.NORMS] == pytest.approx(expected, rel=1e-6)


def test_the_growth_is_fitted_where_the_rank_is_full() -> None:
    def row(m: int, full_rank: bool) -> dict[str, Any]:
        norms = dict(zip(spectrum.NORMS, (m**2, m, m, 1)))
        return {"m": m, "inverse": "exact", "full_rank": full_rank} | norms

    found = [row(49, True), row(100, True), row(196, True), row(1024, False)]
    assert spectrum.growth(found, "exact", "soft") == pytest.approx(2)
    assert spectrum.growth(found, "exact", "softpp") == pytest.approx(1)
    assert spectrum.growth(found[:1], "exact", "soft") is None
    assert "2.00" in spectrum.growth_table(found)
    assert "m = [49, 100, 196]" in spectrum.growth_table(found)


def test_models_with_a_fixed_number_of_landmarks_are_refused(
    write_checkpoint: WriteCheckpoint,
) -> None:
    (image,) = given_images(None, 1).values()
    (softmax,) = subjects(None, embedded=["softmax"])
    (softx,) = subjects([write_checkpoint("softx")])
    for subject in (softmax, softx):
        with pytest.raises(ValueError, match="has no landmark matrices to invert; give"):
            spectrum.landmark_matrix(subject, image, side=7)
    (fixed,) = subjects(None, embedded=["softpp"])
    sampler = fixed.classifier.model.get_submodule("stages.0.blocks.0.attention").sampler
    sampler.num_landmarks = 16
    with pytest.raises(ValueError, match="has 16 landmarks at all sizes; take a model"):
        spectrum.landmark_matrix(fixed, image, side=7)


def test_the_command_draws_writes_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spectrum, "SIDES", [3, 4])
    monkeypatch.setattr(spectrum, "SHOWN", 3)
    monkeypatch.setattr(spectrum, "IMAGES", 1)
    monkeypatch.setattr(plt.Figure, "savefig", lambda *_, **__: None)  # as newton's, and slow
    main(["figures", "spectrum", "--out", str(tmp_path)])
    assert "paper: m^" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "spectrum.csv").read_text().splitlines()))
    assert len([row for row in rows if row["eigenvalue"]]) == 2 * 9  # heads and eigenvalues
    assert len([row for row in rows if row["inverse"]]) == 2 * 2 * 2  # heads, sizes and inverses
