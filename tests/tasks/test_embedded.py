"""The models that come with the package."""

import pytest
import torch

from softmaxfree.data.sources import Digits
from softmaxfree.layers.registry import attention_class
from softmaxfree.tasks.embedded import EMBEDDED, embedded_classifier


@pytest.mark.parametrize("attention", EMBEDDED)
def test_an_embedded_model_knows_its_digits(attention: str) -> None:
    classifier = embedded_classifier(attention)
    assert classifier.size == 32
    assert classifier.classes == [str(digit) for digit in range(10)]
    first = classifier.model.get_submodule("stages.0.blocks.0.attention")
    assert isinstance(first, attention_class(attention))
    loaded = [Digits("val").load(index) for index in range(120)]
    with torch.no_grad():
        logits = classifier.model(torch.cat([classifier.tensor(image) for image, _ in loaded]))
    correct = logits.argmax(1) == torch.tensor([target for _, target in loaded])
    assert correct.float().mean() >= 0.95


def test_another_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="attention 'linformer' is embedded; choose one of"):
        embedded_classifier("linformer")
