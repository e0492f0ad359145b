"""softx: the choices that made it, and what it does against its peers.

Choices are made on seeds 0 to 2 and on a fifth of the training images, verdicts on seeds 10 to 14
and the test images. docs/softx.md has the protocol.
"""

from typing import Any

from .contestants import Budget, Contestant
from .experiments import PAPERS, Claim, Experiment

_GATE = {"gate": True, "value_conv_per_channel": True}
_POOLED = {"global_pool": "avg", "class_token": False}


def _softx(tie_qk: bool | None = None, **model: Any) -> Contestant:
    """softx_nano with other arguments; `attention_options` are added to its own."""
    if "attention_options" in model:
        model["attention_options"] = _GATE | model["attention_options"]
    return Contestant(backbone="softx_nano", tie_qk=tie_qk, options=model)


def _peer(attention: str, mlp_ratio: float, **model: Any) -> Contestant:
    """softpp_nano with another attention and with what softx has beside its own."""
    options = {"attention_options": _GATE, "mlp_ratios": mlp_ratio, **_POOLED, **model}
    return Contestant(attention, options=options)


def _with(**options: Any) -> Contestant:
    return _softx(attention_options=options)


CHOICES = Budget(
    "choices",
    {
        "softx": _softx(),
        "softx, inverse": _with(middle="inverse"),
        "softx, landmarks of keys": _with(landmarks_of="keys"),
        "softx, landmarks of both": _with(landmarks_of="both"),
        "softx, no key weights": _with(key_weights=False),
        "softx, convolutional landmarks": _softx(sampler="conv"),
        "softx, tied": _softx(tie_qk=True),
        "softx, class token": _softx(global_pool="token", class_token=True),
        "softx, position by convolution": _softx(position="conv"),
        "softx, pre-norm": _softx(pre_norm=True),
        "softx, no gate": _with(gate=False),
        "softx, value kernels by head": _with(value_conv_per_channel=False),
    },
    "softx_nano with what the contestant's name says, trained on four fifths of CIFAR-10's "
    "training images for 400 steps of 128 images from random weights, scored on the other fifth",
    arguments=("--data.root=cifar10_whole/train", "--data.val_split=validation"),
)

_EPOCHS_10 = ("--trainer.max_steps=3900", "--model.warmup_steps=390", "--data.cache=true")
_VERDICTS = (10, 11, 12, 13, 14)

CIFAR10 = Budget(
    "cifar10",
    {
        "softx": _softx(mlp_ratios=4.35),
        "softx, inverse": _softx(mlp_ratios=3.3, attention_options={"middle": "inverse"}),
        "softmax": _peer("softmax", 2.75),
        "agent": _peer("agent", 4.15),
        "softpp": _peer("softpp", 4.8),
    },
    "Nano models of equal cost, each with gate, value kernels by channel and average pooling, "
    "trained on CIFAR-10 for 10 epochs (3,900 steps of 128 images) from random weights",
    arguments=_EPOCHS_10,
    seeds=_VERDICTS,
    corrected=True,
)

_DEEPER: dict[str, Any] = {"img_size": 64, "depths": [1, 2, 4, 1]}
"""What softmax pays for 1,024 tokens, others have for more blocks."""

TINY_IMAGENET = Budget(
    "tiny_imagenet",
    {
        "softx": _softx(**_DEEPER, num_landmarks=49, mlp_ratios=4.2),
        "softx, inverse": _softx(
            **_DEEPER, mlp_ratios=4.45, attention_options={"middle": "inverse"}
        ),
        "softmax": _peer("softmax", 2.75, img_size=64),
        "agent": _peer("agent", 3.8, **_DEEPER, num_landmarks=49),
        "softpp": _peer("softpp", 4.6, **_DEEPER, num_landmarks=49),
    },
    "Nano models of equal cost at 64 x 64 pixels, each with gate, value kernels by channel and "
    "average pooling, trained on Tiny-ImageNet-20 (5,000 images) for 20 epochs (1,560 steps of 64 "
    "images) from random weights, recipes/reproduction/tiny_imagenet20.yaml",
    recipe="reproduction/tiny_imagenet20.yaml",
    classes=20,
    side=64,
    seeds=_VERDICTS,
    corrected=True,
)


def _against(budget: Budget) -> tuple[Claim, ...]:
    """softx, with and without the inverse, against each of the others."""
    ours = ("softx", "softx, inverse")
    score = f"accuracy@{budget.side}"
    pairs = [("softx", "softx, inverse")]
    pairs += [(one, other) for one in ours for other in budget.contestants if other not in ours]
    return tuple(Claim(*pair, "not in it", score) for pair in pairs)


SOFTX: dict[str, Experiment] = {
    "softx-choices": Experiment(
        "What softx is made of",
        tuple(
            Claim("softx", other, "not in it") for other in CHOICES.contestants if other != "softx"
        ),
        CHOICES,
    ),
    "softx-cifar10": Experiment(
        "softx and its peers on CIFAR-10, at equal cost", _against(CIFAR10), CIFAR10
    ),
    "softx-tiny-imagenet": Experiment(
        "softx and its peers on Tiny-ImageNet-20, at equal cost",
        _against(TINY_IMAGENET),
        TINY_IMAGENET,
    ),
}

EXPERIMENTS: dict[str, Experiment] = PAPERS | SOFTX
"""All experiments, by the names on the command line."""
