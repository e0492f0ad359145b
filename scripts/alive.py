"""Measures which attentions of trained models are switched off; a minute of one core.

    SOFTMAXFREE_DATA=... python scripts/alive.py

writes results/alive.json, .csv and .md: what every attention of the shipped weights passes, how far
its rows are from uniform, and what accuracy is left without those that are switched off
(docs/method.md).
"""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from softmaxfree import MultiHeadAttention, diagnose
from softmaxfree.analysis.diagnosis import LEAST_PASSED
from softmaxfree.data.image_files import load_image
from softmaxfree.data.sources import Digits
from softmaxfree.lab.results import Column, Page, Row, columns, publish, result
from softmaxfree.models.weights import find_weights
from softmaxfree.tasks.predict import Classifier

CIFAR10 = ("softpp_nano.cifar10", "soft_nano.cifar10")
DIGITS = ("softpp", "soft", "softmax", "performer", "nystromformer")
PER_CLASS = 50
"""Test images of CIFAR-10 of each class that are classified."""
STEP = 10
"""One of so many images is looked into."""

Labelled = Sequence[tuple[Image.Image, int]]


def cifar10() -> Labelled:
    folders = sorted((Path(os.environ["SOFTMAXFREE_DATA"]) / "cifar10/test").iterdir())
    return [
        (load_image(path), label)
        for label, folder in enumerate(folders)
        for path in sorted(folder.iterdir())[:PER_CLASS]
    ]


def digits() -> Labelled:
    source = Digits("val")
    return [source.load(number) for number in range(len(source))]


@torch.inference_mode()
def accuracy(model: torch.nn.Module, tensors: Tensor, labels: Tensor) -> float:
    found = torch.cat([model(batch).argmax(1) for batch in tensors.split(50)])
    return (found == labels).double().mean().item()


def measured(name: str, images: Labelled) -> Row:
    """The row of one model."""
    classifier = Classifier(find_weights(name))
    model = classifier.model
    tensors = torch.cat([classifier.tensor(image) for image, _ in images])
    labels = torch.tensor([label for _, label in images])
    layers = diagnose(model, tensors[::STEP]).layers
    row = {
        "weights": name,
        "layers": [layer.name for layer in layers],
        "passes": [layer.passes.mean for layer in layers],
        "unevenness": [layer.unevenness.mean for layer in layers],
        "images": len(labels),
        "accuracy": accuracy(model, tensors, labels),
    }
    off = [layer.name for layer in layers if layer.passes.mean < LEAST_PASSED]
    for place in off:
        attention = model.get_submodule(place)
        assert isinstance(attention, MultiHeadAttention)
        vars(attention)["attend"] = lambda q, k, v, layout: torch.zeros_like(q)
    row["switched_off"] = len(off)
    row["accuracy_without"] = accuracy(model, tensors, labels) if off else None
    return row


def page(content: Row) -> Page:
    """Two lines for each model: what its attentions pass, and how uneven their rows are."""
    stages = [int(name.split(".")[1]) + 1 for name in content["rows"][0]["layers"]]
    lines = []
    for row in content["rows"]:
        lines.append({**row, "what": "passes", "numbers": row["passes"]})
        lines.append({"weights": "", "what": "uneven", "numbers": row["unevenness"]})

    def number(i: int) -> Callable[[Row], str]:
        return lambda line: f"{100 * line['numbers'][i]:.2g}"

    return Page(
        "Attentions that are switched off",
        [
            "In %, by layer. passes: |S v| / |v|, what an attention passes of its values' "
            "magnitude. uneven: how far rows of S are from uniform, the total variation distance. "
            "without: accuracy if attentions that pass less than 10 % give 0.",
            columns(
                lines,
                Column("weights", "weights"),
                Column("", "what"),
                *(Column(f"stage {stage}", number(i)) for i, stage in enumerate(stages)),
                Column("accuracy", "accuracy", 1, 0.01),
                Column("without", "accuracy_without", 1, 0.01),
            ),
        ],
    )


def main() -> None:
    warnings.simplefilter("ignore")  # diagnose's, which are what is measured
    torch.set_num_threads(1)
    rows = [measured(name, images) for images in [cifar10()] for name in CIFAR10]
    rows += [measured(f"digits-{name}", images) for images in [digits()] for name in DIGITS]
    publish(Path("results/alive"), result("python scripts/alive.py", rows), page)


if __name__ == "__main__":
    main()
