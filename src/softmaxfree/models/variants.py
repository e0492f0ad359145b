"""The models of SOFT, SOFT++ and softx by name: what each is made of, registered in timm.

A name is a design and a size, such as `softpp_small`. The journal's table (tiny to large) has
softmax-free attention in all stages; the authors' release (`*_fudan`) has softmax in the last one,
and only for it are there checkpoints of theirs.
"""

from functools import partial
from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from .backbone import default_cfg
from .checkpoints import checkpoint_filter_fn
from .soft import SoftmaxFreeTransformer

DESIGNS: dict[str, dict[str, Any]] = {
    "soft": {"attention": "soft"},
    "softpp": {"attention": "softpp"},
    "softx": {
        "attention": "softx",
        "attention_options": {"gate": True, "value_conv_per_channel": True},
        "global_pool": "avg",
        "class_token": False,
        "num_landmarks": 49,
        "mlp_ratios": 3.0,
    },
}
"""What the first word of a name stands for: the paper's two, and one whose attention averages. Its
hidden layers are smaller by what its further projections cost."""

SIZES: dict[str, dict[str, Any]] = {
    "nano": {
        "img_size": 32,
        "stem_stride": 2,
        "embed_dims": (32, 64, 128, 160),
        "depths": (1, 1, 2, 1),
        "num_heads": (2, 4, 8, 10),
        "ratios": (4, 2, 1, 1),
        "value_conv": (5, 5, 3, 0),
    },
    "tiny": {"embed_dims": (64, 128, 320, 512), "depths": (2, 2, 5, 2)},
    "small": {"embed_dims": (96, 192, 384, 768), "depths": (2, 2, 5, 2)},
    "medium": {"embed_dims": (96, 192, 384, 768), "depths": (2, 2, 18, 2)},
    "large": {"embed_dims": (128, 256, 512, 1024), "depths": (2, 2, 18, 2)},
    "tiny_fudan": {"embed_dims": (64, 128, 320, 512), "depths": (1, 2, 3, 2)},
    "small_fudan": {"embed_dims": (64, 128, 320, 512), "depths": (1, 3, 20, 4)},
    "medium_fudan": {"embed_dims": (64, 128, 288, 512), "depths": (1, 3, 29, 5)},
    "large_fudan": {"embed_dims": (64, 128, 320, 512), "depths": (1, 3, 40, 5)},
    "huge_fudan": {"embed_dims": (64, 128, 352, 512), "depths": (1, 5, 49, 5)},
}
"""What the rest of a name stands for: nano, the journal's table, the authors' release."""

NANO_SOFTX = {"num_landmarks": 16, "mlp_ratios": 3.25}
"""As many landmarks as `softpp_nano` has of 32 x 32 pixels, and its multiply-adds."""

PUBLISHED: dict[str, Path] = {
    path.stem: path
    for path in sorted((Path(__file__).parents[1] / "weights").glob("*.cifar10.safetensors"))
}
"""Names with weights, and their files; docs/weights.md has the cards and says what a wheel has."""


def _is_built(design: str, size: str) -> bool:
    """Of softx there is no authors' release."""
    return design != "softx" or not size.endswith("_fudan")


_SMALL_IMAGES = {"input_size": (3, 32, 32), "pool_size": (2, 2), "crop_pct": 1.0}
_CIFAR10: dict[str, Any] = {
    "num_classes": 10,
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.247, 0.2435, 0.2616),
    "label_names": (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    ),
}  # fmt: skip
default_cfgs = generate_default_cfgs(
    {
        name: default_cfg(**_SMALL_IMAGES, **_CIFAR10, file=str(path))
        for name, path in PUBLISHED.items()
    }
    | {  # the star makes it what a name without a tag means
        f"{design}_{size}.untrained*": default_cfg(**(_SMALL_IMAGES if size == "nano" else {}))
        for design in DESIGNS
        for size in SIZES
        if _is_built(design, size)
    }
)


def _create(name: str, pretrained: bool, **kwargs: Any) -> SoftmaxFreeTransformer:
    """The model of that name, with some of its arguments replaced."""
    design, size = name.split("_", 1)
    nano = NANO_SOFTX if name == "softx_nano" else {}
    arguments = _merged(SIZES[size], DESIGNS[design], nano, kwargs)
    if size.endswith("_fudan"):
        arguments = _merged(_as_released(arguments["attention"]), arguments)
    return build_model_with_cfg(
        SoftmaxFreeTransformer,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2, 3), "feature_cls": "getter"},
        **arguments,
    )


def _merged(*tables: dict[str, Any]) -> dict[str, Any]:
    """All arguments, the last table's first; `ratios` and `num_landmarks` replace each other."""
    merged: dict[str, Any] = {}
    for table in tables:
        if table.keys() & {"ratios", "num_landmarks"}:
            merged.pop("ratios", None)
            merged.pop("num_landmarks", None)
        merged |= table
    return merged


def _as_released(attention: str) -> dict[str, Any]:
    """Softmax in stage 4, tanh-GELU, and landmarks and inverse as the weights were trained."""
    arguments = {"stage4": "softmax", "act_layer": "gelu_tanh", "ratios": (8, 4, 2, 1)}
    inverses = {"soft": "damped", "softpp": "backtrack"}
    if attention in inverses:
        arguments |= {"inverse": inverses[attention], "pad": "drop"}
    return arguments


def _register(name: str, docstring: str) -> None:
    """Makes a function of that name in this file, which builds the model, and tells timm."""

    def build(pretrained: bool = False, **kwargs: Any) -> SoftmaxFreeTransformer:
        return _create(name, pretrained, **kwargs)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = docstring
    globals()[name] = register_model(build)


for _design, _title in (("soft", "SOFT"), ("softpp", "SOFT++"), ("softx", "softx")):
    for _size in filter(partial(_is_built, _design), SIZES):
        _word, _, _release = _size.partition("_")
        _source = {
            "nano": "for images of 32 to 64 pixels",
            "fudan": "as the authors released it",
        }.get(_release or _word, "of the journal's table")
        if _design == "softx":
            _source += ", with attention that averages, at the same cost"
        _register(f"{_design}_{_size}", f"{_title}-{_word.capitalize()} {_source}.")
