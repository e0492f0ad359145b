"""The diagnosis: its numbers, and what it foretells."""

import math
import warnings
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softmaxfree import SoftmaxFreeAttention, diagnose, recorded_attention
from softmaxfree.analysis.measures import unevenness
from softmaxfree.data.sources import Digits
from softmaxfree.models.weights import find_weights
from softmaxfree.tasks.predict import Classifier

from ..helpers import tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*switched off")  # as untrained ones happen to be


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **options).eval()


def natural(side: int, count: int = 2) -> Tensor:
    """Noise with the spectrum of photographs: as much detail at every scale."""
    spectrum = torch.fft.rfft2(tokens(count, 3, side, side, dtype=torch.float32))
    frequency = torch.hypot(torch.fft.fftfreq(side)[:, None], torch.fft.rfftfreq(side))
    x = torch.fft.irfft2(spectrum / frequency.clamp(min=1 / side), s=(side, side))
    return (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)


@pytest.mark.parametrize("name", ["soft_nano", "softpp_nano"])
def test_numbers_are_those_of_the_matrices(name: str) -> None:
    model, images = build(name), natural(32, count=1)
    layers = diagnose(model, images).layers
    with torch.no_grad(), recorded_attention(model) as records:
        model(images)
    assert [layer.name for layer in layers] == list(records)
    for layer, record in zip(layers, records.values()):
        p, _, a, inverse, _, z = record.factors().double()
        assert a is not None
        assert inverse is not None
        b, s = a + 0.01 * torch.eye(a.shape[-1]), p @ z @ p.mT
        expected = {
            "condition": torch.linalg.cond(a),
            "ridged_condition": torch.linalg.cond(b),
            "inverse_norm": torch.linalg.matrix_norm(inverse, 2),
            "middle_norm": torch.linalg.matrix_norm(z, 2),
            "landmark_attention_norm": torch.linalg.matrix_norm(a @ z @ a, 2),
            "norm": torch.linalg.matrix_norm(s, 2),
        }
        for measure, values in expected.items():
            mean, largest = getattr(layer, measure)
            assert mean == pytest.approx(values.mean().item(), rel=1e-3), measure
            assert largest == pytest.approx(values.max().item(), rel=1e-3), measure
        assert (layer.tokens, layer.num_landmarks) == p.shape[-2:]
        assert layer.normalize == (name == "softpp_nano")
        eigenvalues = torch.linalg.eigvalsh(a)
        assert layer.eigenvalues[0] == pytest.approx(eigenvalues.min().item(), rel=1e-6)
        assert layer.eigenvalues[1] == pytest.approx(eigenvalues.max().item(), rel=1e-6)
        assert layer.residual.max < 1e-5  # float32's
        assert layer.growth == 1


def test_images_are_measured_each_by_itself() -> None:
    model, images = build("softpp_nano"), natural(32)
    images[1] = 5 * images[1]
    both = diagnose(model, images).layers
    first, second = (diagnose(model, image).layers for image in images.split(1))
    for of_both, one, other in zip(both, first, second):
        assert of_both.norm.max == pytest.approx(max(one.norm.max, other.norm.max), rel=1e-6)
        assert of_both.norm.mean == pytest.approx((one.norm.mean + other.norm.mean) / 2, rel=1e-6)


def test_the_collapse_of_soft_at_other_resolutions_is_foretold() -> None:
    model = build("soft_nano")
    with pytest.warns(UserWarning, match="at 64 x 64 pixels") as caught:
        diagnosis = diagnose(model, natural(64))
    sentence = next(text for text in diagnosis.warnings if "strong" in text)
    assert str(caught[0].message) == diagnosis.warnings[0]
    assert "at 64 x 64 pixels" in sentence
    assert "at 32 x 32, where the model was trained, in 5 of 5 layers" in sentence
    assert "as SOFT is not normalised" in sentence
    assert (diagnosis.size, diagnosis.trained_size) == ((64, 64), (32, 32))
    with pytest.warns(UserWarning, match="at 32 x 32 pixels"):
        smaller = diagnose(model, natural(32), trained_size=64)
    assert any("as SOFT is not normalised" in text for text in smaller.warnings)
    for other, side in ((model, 32), (build("soft_nano", img_size=64), 64)):
        assert not any("strong" in text for text in diagnose(other, natural(side)).warnings)


@pytest.mark.parametrize("side", [16, 48, 96])
def test_softpp_stays_in_range(side: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # untrained, it may change its mind
        diagnosis = diagnose(build("softpp_nano"), natural(side))
    assert not any("strong" in sentence for sentence in diagnosis.warnings)
    for layer in diagnosis.layers:
        assert layer.middle_norm.max < layer.inverse_norm.max
        assert 0.5 < layer.landmark_attention_norm.mean < 1.6


def test_the_collapse_of_trained_softpp_is_foretold() -> None:
    """By the classes of the same images at both sizes: its norms stay in range."""
    weights = find_weights("digits-softpp")
    model, classifier = weights.build(), Classifier(weights)
    images = torch.cat([classifier.tensor(Digits("val").load(i)[0], 64) for i in range(6)])
    with pytest.warns(UserWarning, match=r"at 64 x 64 pixels .* get another class than at 32 x 32"):
        diagnosis = diagnose("digits-softpp", images)
    assert len(diagnosis.warnings) == 2  # and of attentions that are switched off
    assert all(layer.growth and 0.5 < layer.growth < 2 for layer in diagnosis.layers)
    with torch.no_grad():
        small = F.interpolate(images, (32, 32), mode="bilinear", antialias=True)
        same = model(images).argmax(1) == model(small).argmax(1)
    assert diagnosis.agreement == pytest.approx(same.float().mean().item())
    assert f"the same class at both for {diagnosis.agreement * 100:.0f} % of them" in str(diagnosis)
    with pytest.warns(UserWarning, match="switched off"):
        at_home = diagnose(model, small[:1])
    assert (at_home.agreement, len(at_home.warnings)) == (1, 1)


def test_an_inverse_that_is_none_is_told() -> None:
    with pytest.warns(UserWarning, match="leaves a residual"):
        diagnosis = diagnose(build("softpp_nano", inverse="newton", iters=1), natural(32))
    assert len([text for text in diagnosis.warnings if "switched off" not in text]) == 1


def test_values_that_are_not_finite_are_told() -> None:
    images = natural(32)
    images[1, 0, 3, 3] = math.nan
    with pytest.warns(UserWarning, match=r"not finite in layer 'stages\.0\.blocks\.0\.attention'"):
        diagnosis = diagnose(build("softpp_nano"), images)
    assert math.isnan(diagnosis.layers[0].norm.max)


@pytest.mark.parametrize("attention", ["softx", "softpp", "softmax", "performer"])
def test_what_every_attention_passes_and_how_uneven_its_rows_are(attention: str) -> None:
    model, images = build("softpp_nano", attention=attention), natural(32, count=2)
    diagnosis = diagnose(model, images)
    with torch.no_grad(), recorded_attention(model) as records:
        model(images)
    for layer, record in zip(diagnosis.layers, records.values()):
        s = record.rows_by_gradient(range(layer.tokens)).double()
        passed, v = s @ record.v.double(), record.v.double()
        expected = (passed.square().mean((2, 3)) / v.square().mean((2, 3))).sqrt()
        assert layer.passes.mean == pytest.approx(expected.mean().item(), rel=1e-3)
        assert layer.passes.max == pytest.approx(expected.max().item(), rel=1e-3)
        if layer.tokens <= 17:  # otherwise some rows stand for all
            shares = s.abs() / s.abs().sum(-1, keepdim=True)
            moved = (shares - 1 / s.shape[-1]).clamp(min=0).sum(-1).mean(-1)
            rel = 0.1 if layer.tokens == 17 else 1e-3
            assert layer.unevenness.mean == pytest.approx(moved.mean().item(), rel=rel, abs=1e-6)
        assert (layer.norm is None) == (attention in ("softmax", "performer"))
        assert (layer.condition is None) == (layer.growth is None) == (attention != "softpp")
    header = str(diagnosis).splitlines()[1].split()
    assert header[-3:] == {
        "softx": ["passes", "uneven", "|S|"],
        "softpp": ["|AZA|", "growth", "residual"],
    }.get(attention, ["n", "passes", "uneven"])


def test_unevenness_is_0_for_equal_weights_and_nearly_1_for_one_key() -> None:
    equal, one = torch.full((1, 1, 2, 10), -0.3), torch.eye(10)[None, None, :2]
    assert unevenness(equal).item() == pytest.approx(0, abs=1e-6)
    assert unevenness(one).item() == pytest.approx(0.9)


def test_attentions_that_are_switched_off_are_named() -> None:
    """Those of the weights for CIFAR-10, which explains ablations that tell nothing."""
    with pytest.warns(UserWarning, match="switched off in 3 of 5 layers"):
        diagnosis = diagnose("softpp_nano.cifar10", natural(32))
    (sentence,) = diagnosis.warnings
    for layer in diagnosis.layers:
        assert (layer.name in sentence) == (layer.passes.mean < 0.1)
    assert min(layer.passes.mean for layer in diagnosis.layers) < 0.01


class Wrapped(nn.Module):
    """Attention in a model that does not tell its size."""

    def __init__(self) -> None:
        super().__init__()
        self.somewhere_deep_inside_of_a_model = SoftmaxFreeAttention(12, 2, ratio=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.somewhere_deep_inside_of_a_model(x.flatten(2).mT, tuple(x.shape[-2:]))


def test_a_model_of_unknown_size() -> None:
    images = tokens(1, 12, 6, 6, dtype=torch.float32)
    diagnosis = diagnose(Wrapped(), images)
    assert diagnosis.trained_size is None
    assert diagnosis.layers[0].growth is None
    assert not diagnosis.warnings
    assert "trained at an unknown size" in str(diagnosis)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert diagnose(Wrapped(), images, trained_size=(3, 4)).trained_size == (3, 4)


def test_positions_by_convolution_have_no_size() -> None:
    diagnosis = diagnose(build("softx_nano", position="conv"), natural(16, 1))
    assert (diagnosis.trained_size, diagnosis.agreement) == (None, None)


def test_printed_it_is_a_table() -> None:
    title, header, *lines, warning = str(
        diagnose(build("softpp_nano"), natural(32, 1))
    ).splitlines()
    assert warning.startswith("warning: at 32 x 32 pixels attention is switched off in 1 of 5")
    assert title == "images of 32 x 32 pixels, model trained at 32 x 32"
    assert header.split()[:3] == ["layer", "n", "m"]
    assert [line.split()[0] for line in lines] == [
        f"stages.{i}.blocks.{j}.attention" for i, j in ((0, 0), (1, 0), (2, 0), (2, 1), (3, 0))
    ]
    assert {len(line) for line in (header, *lines)} == {97}
    long = str(diagnose(Wrapped(), tokens(1, 12, 6, 6, dtype=torch.float32))).splitlines()[-1]
    assert long.startswith("...re_deep_inside_of_a_model ")
    assert len(long) == 97 - len("  growth")  # its trained size is unknown


def test_refusals() -> None:
    with pytest.raises(ValueError, match="Linear has no attention of this package"):
        diagnose(nn.Linear(3, 3), natural(32))
    with pytest.raises(ValueError, match=r"images must be \(B, channels, H, W\)"):
        diagnose(build("softpp_nano"), natural(32)[0])
    with pytest.raises(ValueError, match="trained_size"):
        diagnose(build("softpp_nano"), natural(32), trained_size=(1, 2, 3))
