"""Trains a model on handwritten digits by the recipe of `softmaxfree fit`.

    python -m softmaxfree_mindspore.train --out runs/mindspore

The recipe is the repository's recipes/digits/softpp_nano.yaml, read as it is: the same images in
the same order, AdamW, a cosine with warm-up, label smoothing, stochastic depth, gradients clipped,
and a moving average of the weights, which is what is scored and saved.
"""

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from .digits import Digits, Preparation, epoch_batches, load_digits
from .models.checkpoints import save_weights
from .models.soft import SoftmaxFreeTransformer, create_model

RECIPE = Path(__file__).parents[3] / "recipes" / "digits" / "softpp_nano.yaml"
"""Where it is in a clone."""

WARMUP_LR, MIN_LR = 1e-6, 1e-5
"""Where the learning rate starts and ends."""

CLASSES = 10
"""The digits; a recipe leaves the number to its data."""


@dataclass(frozen=True)
class Recipe:
    """What of a recipe's file is used here; each field is called as it is there."""

    seed: int
    max_epochs: int
    gradient_clip_val: float
    backbone: str
    drop_path: float
    smoothing: float
    lr: float
    weight_decay: float
    warmup_epochs: int
    ema: float
    batch_size: int
    preparation: Preparation


def read_recipe(path: Path) -> Recipe:
    """A recipe for the digits; refuses one for other data."""
    import yaml

    if not path.is_file():
        raise ValueError(f"there is no recipe {path}; give --config the path of one in a clone")
    file = yaml.safe_load(path.read_text())
    model, data, trainer = file["model"]["init_args"], file["data"]["init_args"], file["trainer"]
    if (data["name"], data["crop_pct"], data["flip"]) != ("digits", 1.0, 0.0):
        raise ValueError(
            f"{path} is no recipe for the digits, neither flipped nor cropped to score"
        )
    own = ("backbone", "drop_path", "smoothing", "lr", "weight_decay", "warmup_epochs", "ema")
    return Recipe(
        seed=file["seed_everything"],
        max_epochs=trainer["max_epochs"],
        gradient_clip_val=trainer["gradient_clip_val"],
        batch_size=data["batch_size"],
        preparation=Preparation(
            size=data["size"],
            **{name: tuple(data[name]) for name in ("crop_scale", "crop_ratio", "mean", "std")},
        ),
        **{name: model[name] for name in own},
    )


def learning_rate(step: int, steps: int, rising: int, lr: float) -> float:
    """Linear warm-up, then the rest of half a cosine over all steps."""
    if step < rising:
        return WARMUP_LR + step * (lr - WARMUP_LR) / rising
    return MIN_LR + 0.5 * (lr - MIN_LR) * (1 + math.cos(math.pi * step / steps))


def kept_average(updates: int, decay: float) -> float:
    """How much of the moving average stays: less at first, none at the very first."""
    return min(decay, (1 + updates) / (10 + updates)) if updates else 0.0


def decayed(name: str, parameter: Parameter) -> bool:
    """Whether weight decay is for a parameter: not for biases, norms and embeddings."""
    return parameter.ndim > 1 and ".position." not in name and not name.endswith("cls_token")


class AdamW(nn.Cell):
    """Adam with decoupled weight decay and corrected bias, one fused operation a parameter.

    MindSpore's operation corrects no bias. With c = sqrt(1 - beta2^t) / (1 - beta1^t), AdamW's
    step lr m' / (sqrt(v') + eps) is its step of rate c lr and epsilon eps sqrt(1 - beta2^t).
    """

    def __init__(self, model: nn.Cell, weight_decay: float) -> None:
        super().__init__()
        named = [(name, p) for name, p in model.parameters_and_names() if p.requires_grad]
        self.parameters = ParameterTuple([parameter for _, parameter in named])
        self.first = self.parameters.clone("first", init="zeros")
        self.second = self.parameters.clone("second", init="zeros")
        self.decays = tuple(weight_decay if decayed(name, p) else 0.0 for name, p in named)
        self.update = ops.AdamWeightDecay()
        self.beta1, self.beta2, self.eps = 0.9, 0.999, 1e-8

    def construct(self, gradients: tuple[Tensor, ...], lr: Tensor, step: Tensor) -> None:
        """Updates all parameters; steps count from 1."""
        root = ops.sqrt(1 - ops.pow(self.beta2, step))
        correction = root / (1 - ops.pow(self.beta1, step))
        for i in range(len(self.parameters)):
            self.update(
                self.parameters[i],
                self.first[i],
                self.second[i],
                lr * correction,
                self.beta1,
                self.beta2,
                self.eps * root,
                self.decays[i] / correction,
                gradients[i],
            )


class Average:
    """The moving average of all weights, batch normalisation's statistics included."""

    def __init__(self, model: nn.Cell, decay: float) -> None:
        self.parameters = [parameter for _, parameter in model.parameters_and_names()]
        self.values = [parameter.asnumpy().copy() for parameter in self.parameters]
        self.decay, self.updates = decay, 0

    def update(self) -> None:
        keep = kept_average(self.updates, self.decay)
        self.updates += 1
        for value, parameter in zip(self.values, self.parameters):
            value += (1 - keep) * (parameter.asnumpy() - value)

    def load(self) -> None:
        """Puts the average in the place of the model's weights."""
        for value, parameter in zip(self.values, self.parameters):
            parameter.set_data(Tensor(value))


def training_step(model: nn.Cell, optimizer: AdamW, recipe: Recipe) -> Callable[..., Tensor]:
    """A compiled step: images, classes, learning rate and number of the step -> loss."""

    def loss_of(images: Tensor, targets: Tensor) -> Tensor:
        return ops.cross_entropy(model(images), targets, label_smoothing=recipe.smoothing)

    differentiated = ms.value_and_grad(loss_of, None, optimizer.parameters)

    @ms.jit
    def step(images: Tensor, targets: Tensor, lr: Tensor, number: Tensor) -> Tensor:
        loss, gradients = differentiated(images, targets)
        optimizer(ops.clip_by_global_norm(gradients, recipe.gradient_clip_val), lr, number)
        return loss

    return step


def score(model: SoftmaxFreeTransformer, digits: Digits, recipe: Recipe) -> float:
    """Part of the digits whose class is found."""
    images = recipe.preparation.to_score(digits)
    found = [
        model(Tensor(images[first : first + 120])).asnumpy().argmax(-1)
        for first in range(0, len(images), 120)
    ]
    return float((np.concatenate(found) == digits.targets).mean())


def train(recipe: Recipe, report: Callable[[str], None] = print) -> tuple[nn.Cell, float]:
    """A trained model, its weights averaged, and its accuracy on the held-out digits."""
    ms.set_seed(recipe.seed)
    model = create_model(recipe.backbone, num_classes=CLASSES, drop_path_rate=recipe.drop_path)
    optimizer, average = AdamW(model, recipe.weight_decay), Average(model, recipe.ema)
    step = training_step(model, optimizer, recipe)
    training, held_out = load_digits()
    batches = len(training) // recipe.batch_size
    steps, done = recipe.max_epochs * batches, 0
    for epoch in range(recipe.max_epochs):
        started, losses = time.perf_counter(), []
        model.set_train()
        for indices in epoch_batches(len(training), recipe.batch_size, recipe.seed, epoch):
            images, targets = recipe.preparation.to_train(training, indices, recipe.seed, epoch)
            rate = learning_rate(done, steps, recipe.warmup_epochs * batches, recipe.lr)
            counters = Tensor(rate, ms.float32), Tensor(done + 1, ms.float32)
            loss = float(step(Tensor(images), Tensor(targets, ms.int32), *counters).asnumpy())
            if not math.isfinite(loss):
                raise RuntimeError(f"the loss is {loss} at step {done} (epoch {epoch})")
            losses.append(loss)
            average.update()
            done += 1
        took = time.perf_counter() - started
        report(f"epoch {epoch + 1:3}  loss {np.mean(losses):.4f}  {took:.1f} s")
    average.load()
    model.set_train(False)
    return model, score(model, held_out, recipe)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m softmaxfree_mindspore.train", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--config", type=Path, default=RECIPE, help="a recipe for the digits")
    parser.add_argument("--epochs", type=int, help="in place of the recipe's")
    parser.add_argument("--seed", type=int, help="in place of the recipe's")
    parser.add_argument("--out", type=Path, default=Path("runs/mindspore"), help="folder to write")
    given = parser.parse_args(arguments)
    recipe = read_recipe(given.config)
    changes = {"max_epochs": given.epochs, "seed": given.seed}
    changes = {name: value for name, value in changes.items() if value is not None}
    recipe = Recipe(**(vars(recipe) | changes))
    started = time.perf_counter()
    model, accuracy = train(recipe)
    seconds = time.perf_counter() - started
    given.out.mkdir(parents=True, exist_ok=True)
    save_weights(model, given.out / "model.safetensors")
    summary = describe(recipe, accuracy, seconds)
    (given.out / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"saved {given.out / 'model.safetensors'} after {seconds:.0f} s")
    print(f"held-out accuracy: {accuracy * 100:.2f} %")


def describe(recipe: Recipe, accuracy: float, seconds: float) -> dict[str, Any]:
    """A run's result with what it was measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "accuracy": round(accuracy, 4),
        "seconds": round(seconds, 1),
        "recipe": asdict(recipe),
        "hardware": {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("mindspore", "numpy", "softmaxfree-mindspore")},
        },
    }


if __name__ == "__main__":
    main()
