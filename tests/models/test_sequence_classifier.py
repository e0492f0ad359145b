"""The Long Range Arena's encoder: masks, landmark_matrices, pairs, and what it refuses."""

from typing import Any

import pytest
import torch

from softmaxfree.layers.attention import SoftmaxFreeAttention
from softmaxfree.layers.registry import ATTENTIONS, attention_class
from softmaxfree.models.sequence_classifier import SequenceClassifier, SequenceEncoder


def is_a_layer_of_ours(name: str) -> bool:
    """Not registered by a benchmark or by another file of tests."""
    return attention_class(name).__module__.startswith("softmaxfree.layers.")


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ATTENTIONS if is_a_layer_of_ours(name)),
    ("soft", {"num_landmarks": 8}),
    ("softpp", {"num_landmarks": 8}),
    ("softpp", {"sampler": "conv"}),
    ("softpp", {"value_conv": 3}),
    ("reformer", {"bucket": 8}),
]


def classifier(attention: str, options: dict[str, Any] | None = None, **more: Any) -> Any:
    torch.manual_seed(0)
    given = {"num_classes": 3, "vocabulary": 20, "length": 90, **more}
    model = SequenceClassifier(attention=attention, options=options, **given).eval()
    torch.nn.init.normal_(model.encoder.position)  # so that places matter
    return model


@pytest.mark.parametrize(("attention", "options"), CASES, ids=str)
def test_padding_changes_nothing(attention: str, options: dict[str, Any]) -> None:
    """A sequence alone, and padded beside longer ones, with any tokens in the padding."""
    model = classifier(attention, options)
    lengths = [37, 90, 5, 64]
    sequences = [torch.randint(1, 20, (length,)) for length in lengths]
    tokens = torch.randint(1, 20, (4, 90))
    mask = torch.arange(90) < torch.tensor(lengths)[:, None]
    for row, sequence in zip(tokens, sequences):
        row[: len(sequence)] = sequence
    with torch.no_grad():
        together = model(tokens, mask)
        for logits, sequence in zip(together, sequences):
            alone = model(sequence[None], torch.ones(1, len(sequence), dtype=torch.bool))
            torch.testing.assert_close(logits, alone[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(model(sequence[None])[0], alone[0], atol=1e-5, rtol=1e-5)


def test_pairs_go_through_one_encoder_each_with_its_padding() -> None:
    model = classifier("softpp", pairs=True)
    one, two = torch.randint(1, 20, (2, 30)), torch.randint(1, 20, (2, 50))
    padded = torch.cat([one, torch.zeros(2, 11, dtype=torch.int64)], 1)
    with torch.no_grad():
        logits = model(one, None, two, None)
        same = model(padded, padded != 0, two, two != 0)
        torch.testing.assert_close(logits, same, atol=1e-5, rtol=1e-5)
        a, b = model.encoder(one), model.encoder(two)
        torch.testing.assert_close(logits, model.head(torch.cat([a, b, a * b, a - b], 1)))
        assert not torch.allclose(logits, model(two, None, one, None))
    with pytest.raises(ValueError, match="this model takes pairs: give second_tokens"):
        model(one)
    with pytest.raises(ValueError, match="this model takes no second_tokens"):
        classifier("softpp")(one, None, two, None)


def test_it_is_the_benchmarks_encoder() -> None:
    """Two layers of width 64, hidden width 128 and two heads: weights by hand."""
    encoder = SequenceEncoder(32, 2000, "softmax")
    projections, hidden, norms = 4 * (64 * 64 + 64), 64 * 128 + 128 + 128 * 64 + 64, 4 * 64
    expected = 32 * 64 + 2000 * 64 + 2 * (projections + hidden + norms) + 2 * 64
    assert sum(parameter.numel() for parameter in encoder.parameters()) == expected
    assert [block.attention.num_heads for block in encoder.blocks] == [2, 2]


@pytest.mark.parametrize(("options", "expected"), [(None, 25), ({"num_landmarks": 16}, 16)])
def test_landmarks_are_of_windows_of_4_or_as_many_as_asked_for(
    options: dict[str, Any] | None, expected: int
) -> None:
    encoder = SequenceEncoder(20, 100, "soft", options)
    for block in encoder.blocks:
        attention = block.attention
        assert isinstance(attention, SoftmaxFreeAttention)
        assert not attention.normalize
        q = torch.arange(100.0).view(1, 1, 100, 1).expand(1, 2, 100, 32)
        landmarks, _ = attention.sample(q, (100,), None)
        assert landmarks.shape == (1, 2, expected, 32)
        if options is None:
            assert landmarks[0, 0, :3, 0].tolist() == [1.5, 5.5, 9.5]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence has 91 tokens, but the model is built for 90"):
        classifier("softpp")(torch.ones(1, 91, dtype=torch.int64))
    with pytest.raises(ValueError, match="attention 'softmax' has no num_landmarks"):
        classifier("softmax", {"num_landmarks": 8})
    with pytest.raises(ValueError, match="unknown attention 'sotf'"):
        classifier("sotf")
