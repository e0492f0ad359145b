"""Measures the limits that the documentation states; 10 minutes of one core.

    SOFTMAXFREE_DATA=... python scripts/limits.py

writes results/limits.json, .csv and .md: the shipped weights on larger images and on images of
something else (docs/figures.md, docs/predict.md), and the errors of gradients (docs/promises.md).
"""

import os
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from softmaxfree import diagnose, softmax_free_attention
from softmaxfree.data.image_files import load_image
from softmaxfree.data.sources import Digits
from softmaxfree.lab.results import Column, Page, Row, columns, publish, result
from softmaxfree.models.weights import find_weights
from softmaxfree.tasks.predict import Classifier

Images = Sequence[Image.Image]
CIFAR10 = ("softpp_nano.cifar10", "soft_nano.cifar10")
SIZES = (32, 48, 64, 96, 128)
FOUND = 0.05
"""The share of a model's own held-out images that a threshold takes for something else."""


def some(folder: str, count: int) -> Images:
    """Images below a folder of $SOFTMAXFREE_DATA, drawn at random, always the same."""
    root = Path(os.environ["SOFTMAXFREE_DATA"]) / folder
    paths = sorted(path for path in root.rglob("*") if path.suffix in (".png", ".jpg"))
    return [load_image(path) for path in random.Random(0).sample(paths, count)]


def larger_images() -> Iterator[Row]:
    """Accuracy, and the share of images that keep their class, by size."""
    root = Path(os.environ["SOFTMAXFREE_DATA"]) / "cifar10/test"
    folders = sorted(root.iterdir())
    images = [load_image(path) for x in folders for path in sorted(x.iterdir())[:20]]
    labels = torch.arange(len(folders)).repeat_interleave(20)
    for name in CIFAR10:
        model = Classifier(find_weights(name))
        usual = logits_of(model, images, SIZES[0]).argmax(1)
        for size in SIZES:
            top = logits_of(model, images, size).argmax(1)
            few = torch.cat([model.tensor(image, size) for image in images[::40]])
            growths = [layer.growth or 1.0 for layer in diagnose(model.model, few, 32).layers]
            yield {
                "weights": name,
                "size": size,
                "accuracy": (top == labels).double().mean().item(),
                "same_class": (top == usual).double().mean().item(),
                "least_strength": min(growths),
                "most_strength": max(growths),
            }


@torch.inference_mode()
def logits_of(model: Classifier, images: Images, size: int | None = None) -> Tensor:
    batches = (images[i : i + 50] for i in range(0, len(images), 50))
    return torch.cat(
        [model.model(torch.cat([model.tensor(x, size) for x in batch])) for batch in batches]
    )


@torch.inference_mode()
def features_of(model: Classifier, images: Images) -> Tensor:
    """Pooled features, (images, width)."""
    net: Any = model.model
    tensors = [model.tensor(image) for image in images]
    return torch.cat([net.forward_head(net.forward_features(x), pre_logits=True) for x in tensors])


def other_images() -> Iterator[Row]:
    """How certain models are of images of something else, and which scores tell these apart."""
    digits = {split: Digits(split) for split in ("train", "val")}
    own = {split: [x.load(i)[0] for i in range(len(x))] for split, x in digits.items()}
    cifar, cells = some("cifar10/test", 1000), some("bccd", 100)
    for name, train, held_out, others in (
        ("digits-softpp", own["train"], own["val"], {"CIFAR-10": cifar, "blood cells": cells}),
        (
            CIFAR10[0],
            some("cifar10/train", 2000),
            cifar,
            {"digits": own["val"], "blood cells": cells},
        ),
    ):
        model = Classifier(find_weights(name))
        known = features_of(model, train)
        labels = logits_of(model, train).argmax(1)
        means = torch.stack([known[labels == label].mean(0) for label in labels.unique()])
        spread = known - means[torch.searchsorted(labels.unique(), labels)]
        precision = torch.linalg.pinv(spread.double().T @ spread.double() / len(spread))

        def scores(
            images: Images, model: Any = model, means: Any = means, precision: Any = precision
        ) -> tuple[Tensor, ...]:
            """Probability, energy, and nearness of the features: high for what is known."""
            logits = logits_of(model, images)
            away = (features_of(model, images)[:, None] - means).double()
            nearness = -torch.einsum("nci,ij,ncj->nc", away, precision, away).amin(1)
            return logits.softmax(1).amax(1), logits.logsumexp(1), nearness

        kept = scores(held_out)
        thresholds = [values.double().quantile(FOUND) for values in kept]
        yield {"weights": name, "images": "its own", "certain": kept[0].median().item()}
        for kind, images in others.items():
            values = scores(images)
            found = [(x < t).double().mean().item() for x, t in zip(values, thresholds)]
            shares = dict(zip(("by_probability", "by_energy", "by_distance"), found))
            row = {"weights": name, "images": kind, "certain": values[0].median().item()}
            yield row | shares


def gradients() -> Iterator[Row]:
    """Errors of float32 against float64, relative to the larger of a gradient and the values'."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()  # exact in float32

    for width in (16, 32, 64):
        errors: dict[str, list[float]] = {"tokens": [], "values": [], "landmarks": []}
        for case in range(240):
            n, spread = (64, 196, 400)[case % 3], (0.5, 1.0, 2.0)[case // 3 % 3]
            x, v, weights = spread * draw(n, width), draw(n, width), draw(n, width)
            chosen = x[torch.randperm(n, generator=generator)[:49]]
            both = []
            for dtype in (torch.float32, torch.float64):
                q, values, landmarks = (y.to(dtype).requires_grad_() for y in (x, v, chosen))
                out = softmax_free_attention(q, q, values, landmarks, normalize=case % 2 == 1)
                loss = (out * weights.to(dtype)).sum()
                both.append(torch.autograd.grad(loss, (q, values, landmarks)))
            least = rms(both[1][1])
            for name, got, right in zip(errors, *both):
                errors[name].append(rms(got - right) / max(rms(right), least))
        for name, found in errors.items():
            half, most = torch.tensor(found).quantile(torch.tensor([0.5, 0.99])).tolist()
            yield {"width": width, "gradient": name, "median": half, "percentile_99": most}


def rms(x: Tensor) -> float:
    return F.mse_loss(x.double(), torch.zeros_like(x.double())).sqrt().item()


def page(content: Row) -> Page:
    rows = {kind: [x for x in content["rows"] if x["kind"] == kind] for kind in KINDS}

    def strength(row: Row) -> str:
        return f"{row['least_strength']:.1f} to {row['most_strength']:.1f}"

    return Page(
        "Limits",
        [
            "200 test images of CIFAR-10, enlarged; strength of attention (|A Z A|, relative to 32 "
            "pixels, by layer) on five of them:",
            columns(
                rows["larger"],
                Column("weights", "weights"),
                Column("pixels", "size", 0),
                Column("accuracy %", "accuracy", 0, 0.01),
                Column("same class as at 32 %", "same_class", 0, 0.01),
                Column("strength", strength),
            ),
            "Images of something else: median of the highest probability, and the share that a "
            "threshold finds which 5 % of the model's own held-out images fall below:",
            columns(
                rows["other"],
                Column("weights", "weights"),
                Column("images", "images"),
                Column("certain %", "certain", 0, 0.01),
                Column("by probability %", "by_probability", 0, 0.01),
                Column("by energy %", "by_energy", 0, 0.01),
                Column("by distance %", "by_distance", 0, 0.01),
            ),
            "Gradients in float32 against float64, SOFT and SOFT++, 49 of 64 to 400 tokens as "
            "landmarks, standard deviations from 0.5 to 2; relative errors:",
            columns(
                rows["gradients"],
                Column("gradient", "gradient"),
                Column("width", "width", 0),
                Column("median", lambda row: f"{row['median']:.0e}"),
                Column("99 %", lambda row: f"{row['percentile_99']:.0e}"),
            ),
        ],
    )


KINDS = {"gradients": gradients, "larger": larger_images, "other": other_images}


def main() -> None:
    warnings.simplefilter("ignore")  # diagnose's, which are what is measured
    torch.set_num_threads(1)
    rows = [{"kind": kind, **row} for kind, measure in KINDS.items() for row in measure()]
    publish(Path("results/limits"), result("python scripts/limits.py", rows), page)


if __name__ == "__main__":
    main()
