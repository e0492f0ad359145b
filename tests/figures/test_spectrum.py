"""`softmaxfree figures spectrum`: norms of known matrices, their growth, and the files."""

import csv
from pathlib import Path

import pytest
import torch

from softmaxfree.cli import main
from softmaxfree.figures import spectrum
from softmaxfree.figures.spectrum import Point
from softmaxfree.figures.subject import given_images, subjects
from softmaxfree.ops.kernel import kernel_matrix, token_scale


def test_as_many_bottleneck_tokens_as_tokens_give_the_kernel_of_the_tokens() -> None:
    q = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    tokens = q.flatten(2).mT * token_scale(8)
    torch.testing.assert_close(spectrum.bottleneck_matrix(q, 4), kernel_matrix(tokens))


def test_norms_are_those_of_the_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum, "SIDES", [3])
    q = 3 * torch.randn(2, 8, 6, 6, dtype=torch.float64)
    a = spectrum.bottleneck_matrix(q, 3)
    root = a.sum(-1).rsqrt()
    inverse = torch.linalg.inv(a)
    normalised = root.unsqueeze(-1) * inverse * root.unsqueeze(-2)
    points = [point for point in spectrum.points("image", q) if point.inverse == "exact"]
    for point, x, z, one in zip(points, inverse, normalised, a):
        assert point.full_rank
        assert point.m == 9
        expected = [torch.linalg.matrix_norm(y, 2).item() for y in (x, z, one, one @ z @ one)]
        found = [point.soft, point.softpp, point.soft_attention, point.softpp_attention]
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_growth_is_fitted_where_the_rank_is_full() -> None:
    def point(m: int, full_rank: bool) -> Point:
        return Point("image", 0, m, "exact", full_rank, m**2, m, m, 1)

    found = [point(49, True), point(100, True), point(196, True), point(1024, False)]
    assert spectrum.growth(found, "exact", "soft") == pytest.approx(2)
    assert spectrum.growth(found, "exact", "softpp") == pytest.approx(1)
    assert spectrum.growth(found[:1], "exact", "soft") is None
    assert "2.00" in spectrum.growth_table(found)
    assert "m = [49, 100, 196]" in spectrum.growth_table(found)


def test_a_small_image_is_enlarged_until_there_are_enough_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (subject,) = subjects(None, embedded=["softpp"])
    (image,) = given_images(None, 1).values()
    assert spectrum.tokens(subject, image, 0).shape == (2, 16, 32, 32)
    monkeypatch.setattr(spectrum, "SIDES", [8])
    assert spectrum.tokens(subject, image, 0).shape == (2, 16, 16, 16)
    with pytest.raises(ValueError, match="layer must be a name or a number"):
        spectrum.tokens(subject, image, 9)


def test_the_command_draws_writes_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spectrum, "SIDES", [2, 3])
    monkeypatch.setattr(spectrum, "SHOWN", 3)
    monkeypatch.setattr(spectrum, "IMAGES", 1)
    main(["figures", "spectrum", "--out", str(tmp_path)])
    assert "paper: m^" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "spectrum.csv").read_text().splitlines()))
    assert len([row for row in rows if row["eigenvalue"]]) == 2 * 9  # heads and eigenvalues
    assert len([row for row in rows if row["inverse"]]) == 2 * 2 * 2  # heads, sizes and inverses
    assert (tmp_path / "spectrum.png").is_file()
    assert (tmp_path / "spectrum.svg").is_file()
