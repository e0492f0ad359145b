"""Publishes weights under a name of timm's: `python scripts/publish.py RUN...`.

Writes the weights of training runs into the package, scores them as they will be loaded, and writes
their cards to docs/weights.md.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from embed import in_half_precision
from safetensors import safe_open
from safetensors.torch import save
from timm.data import create_transform, resolve_data_config
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from softmaxfree.data.roots import find_root
from softmaxfree.errors import UserError
from softmaxfree.files import write_atomically
from softmaxfree.models.checkpoints import read_run_checkpoint
from softmaxfree.models.variants import PUBLISHED

TEST_SETS = {"all": "cifar10_whole/test", "half": "cifar10/test"}
"""The 10,000 test images, and the half of them that the tests have; folders of images by class."""

_PAGE = """# Weights

```python
import timm
import softmaxfree

model = timm.create_model("softpp_nano.cifar10", pretrained=True).eval()  # nothing is downloaded
```

As with all of timm's, `num_classes`, `in_chans`, `img_size` and `features_only` adapt them;
`timm.data.resolve_data_config` tells how images are prepared. `python scripts/publish.py` wrote the
files and this page. The wheel carries `softpp_nano.cifar10`; a clone of the repository has all of
them.

## Which weights can be named

Every command that takes trained weights takes all of these:

| what | such as |
| :-- | :-- |
| a name with weights | `softpp_nano.cifar10`, `digits-softpp`, timm's `resnet18.a1_in1k` |
| the folder of a run: its `last.ckpt` | `runs/softpp_nano-digits` |
| a checkpoint of a run | `runs/softpp_nano-digits/best.ckpt` |
| a file that `softmaxfree convert` has written | `model.safetensors` |
| tensors alone, the authors' too, to start training from | `SOFT_tiny.pth` |
| a folder that timm has written for the Hugging Face Hub | `local-dir:FOLDER` |
| a model of the Hub, which is downloaded | `hf-hub:OWNER/NAME` |

    softmaxfree predict IMAGE... --checkpoint softpp_nano.cifar10
    softmaxfree validate --checkpoint softpp_nano.cifar10 --data.root FOLDER
    softmaxfree figures heatmap --checkpoints softpp_nano.cifar10
    softmaxfree explore --checkpoints softpp_nano.cifar10
    softmaxfree export softpp_nano.cifar10 model.onnx
    softmaxfree convert runs/mine mine.safetensors
    softmaxfree fit --model.backbone softpp_nano.cifar10            # starts from these weights
    softmaxfree fit --model.init_checkpoint runs/mine               # so does this
    softmaxfree fit --model.teacher runs/mine                       # learns its predictions too

In Python, `softmaxfree.models.weights.find_weights("runs/mine")` has the model (`build()`), how its
images are prepared (`preparation`) and its `classes`; `softmaxfree.diagnose` takes the same names.
Size, mean, standard deviation, crop and interpolation come with the weights. A name comes before a
file of that name. Tensors alone do not say which model they are of, so only `fit` and `convert`
take them; `convert` recognises SOFT and SOFT++ by the shapes. A backbone without a tag, as in
`--model.backbone softpp_nano`, is trained from scratch, and the run's first lines and
`softmaxfree runs` say so. Nothing in a file is run ([Security](security.md)).

## Cards

{table}

**Trained on** the 50,000 training images of CIFAR-10 (Krizhevsky 2009: ten classes of 32 x 32
pixels), from random weights, by [recipes/cifar10/weights.yaml](../recipes/cifar10/weights.yaml):
{epochs} epochs, AdamW, crops with padding and flips, mixup or CutMix for a fifth of the batches.
**Weights** are the averages of the end of training, in float16. Test images chose no weights and no
seed; one choice was made knowing test scores: to mix fewer batches than
[recipes/cifar10/softpp_nano.yaml](../recipes/cifar10/softpp_nano.yaml), with which SOFT++ had come
to 85.4 % in 24 epochs.
**Scores** are of the file as it is loaded, in float32.

**Limits.** Ten classes, and an answer for every image, also for one of something else. Images must
show one object, filling the frame, in 32 x 32 pixels; accuracy at other sizes is in the table.
Probabilities are not calibrated (labels were smoothed). CIFAR-10 was gathered from the web in
2009, with its biases; nothing beyond it was tested. These are models to try the library with, to
look into and to start from, not the best that is known for CIFAR-10.

{cards}"""

_CARD = """## {name}

- command: `{command}`
- seed {seed}, {minutes:.0f} minutes on {threads} thread of {cpu} ({capability}), commit `{commit}`
- versions: {versions}
- half of the test images, those of this project's tests: {half:.2%}
"""


def publish(run: Path) -> str:
    """Writes a run's weights into the package, in half precision; returns their name in timm."""
    checkpoint = read_run_checkpoint(run / "last.ckpt")
    told: dict[str, Any] = json.loads((run / "run.json").read_text())
    name = f"{checkpoint['hyper_parameters']['backbone']}.cifar10"
    if name not in PUBLISHED:
        raise UserError(f"{run} is of {name}; weights are published of {', '.join(PUBLISHED)}")
    if "scores" not in told:
        raise UserError(
            f"{run} has not ended; go on with `softmaxfree fit --checkpoint {run}/last.ckpt`"
        )
    weights = in_half_precision(checkpoint, "model.")
    overlay = {"state_dict": dict(weights)}
    model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    card = {
        "run": told,
        "epochs": checkpoint["epoch"] + 1,
        "seed": yaml.safe_load((run / "config.yaml").read_text())["seed_everything"],
        "accuracy": {title: accuracy(model, folder) for title, folder in TEST_SETS.items()},
        "sizes": {str(size): accuracy(model, TEST_SETS["all"], size) for size in (48, 64)},
    }
    metadata = {"format": "pt", "card": json.dumps(card)}
    write_atomically(PUBLISHED[name], save(weights, metadata))
    return name


def card(name: str) -> dict[str, Any]:
    """How published weights were trained, and what they score."""
    with safe_open(PUBLISHED[name], framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["card"])
    return found


@torch.inference_mode()
def accuracy(model: nn.Module, root: str, size: int | None = None) -> float:
    """The accuracy of a timm model on images in folders by class, prepared as it is configured.

    Args:
        model: With a `pretrained_cfg`.
        root: Folder as given or below $SOFTMAXFREE_DATA, with one for each class in the order of
            the logits.
        size: Side to resize images to; default: the model's.
    """
    given = {} if size is None else {"img_size": size}
    preparation = resolve_data_config(given, model=model)
    images = ImageFolder(find_root(root), create_transform(**preparation))
    batches = DataLoader(images, batch_size=250)
    right = sum(
        int((model(batch).argmax(1) == targets).sum())
        for batch, targets in tqdm(batches, desc=root, disable=None)
    )
    return right / len(images)


def page() -> str:
    """The cards of all published weights, as Markdown."""
    cards = {name: card(name) for name in PUBLISHED}
    rows = "\n".join(_row(name, found) for name, found in cards.items())
    table = (
        "| weights | test accuracy | at 48 x 48 | at 64 x 64 | parameters | file |\n"
        f"| :-- | --: | --: | --: | --: | --: |\n{rows}"
    )
    epochs = next(iter(cards.values()))["epochs"]
    return _PAGE.format(table=table, epochs=epochs, cards="\n".join(_cards(cards)))


def _row(name: str, found: dict[str, Any]) -> str:
    with safe_open(PUBLISHED[name], framework="pt") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys() if "running_" not in key]  # noqa: SIM118
    parameters = sum(math.prod(shape) for shape in shapes if shape)
    size = PUBLISHED[name].stat().st_size / 1e6
    return (
        f"| `{name}` | {found['accuracy']['all']:.2%} | {found['sizes']['48']:.1%} "
        f"| {found['sizes']['64']:.1%} | {parameters / 1e6:.2f} M | {size:.1f} MB |"
    )


def _cards(cards: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, found in cards.items():
        run = found["run"]
        yield _CARD.format(
            name=name,
            command=run["command"],
            seed=found["seed"],
            minutes=run["seconds"] / 60,
            threads=run["threads"],
            cpu=run["hardware"]["cpu"],
            capability=run["hardware"]["capability"],
            commit=run["commit"],
            versions=", ".join(
                f"{package} {number}" for package, number in run["versions"].items()
            ),
            half=found["accuracy"]["half"],
        )


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(f"written: {publish(Path(folder))}")
    write_atomically(Path("docs/weights.md"), page())
