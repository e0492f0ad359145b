"""What is taken from a file that anybody may have written: plain values, by an allow-list.

A checkpoint comes with its model's arguments and its run's configuration. Numbers, switches, names
of models and folders below the current one are taken from there. Classes, functions, addresses,
absolute paths and names of data that say how it is fetched come from the command line alone.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch import nn

from .errors import UserError, visible
from .layers.table import ATTENTIONS, attention_options

Kind = Callable[[Any], bool]
"""Whether a value may be taken."""
Table = Mapping[str, Any]
"""By name a kind, or the table of a mapping."""

Model = TypeVar("Model", bound=nn.Module)

LARGEST = 2**53
LARGEST_SIZE = 2**20
LARGEST_SIDE = 2**12
"""Pixels that a checkpoint may ask to resize images to."""
SMALLEST_CROP = 0.1
"""Part of a resized image's side that a crop may keep, up to 1."""
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
"""How images may be resized, by timm's names."""
MOST_PROCESSES = 64
"""That train, or load data."""
DEEPEST = 1000
"""Layers of a model."""
LONGEST = 10_000
"""Entries of a list."""
LONGEST_TEXT = 2**20
"""Letters of a configuration."""
_WORD = re.compile(r"[\w.+-]{0,100}", re.ASCII)
_PART = re.compile(r"[\w{} .+-]{1,100}", re.ASCII)
_SPLIT = re.compile(r"[\w-]{0,100}(/[\w-]{1,100})*", re.ASCII)
_PATTERN = re.compile(r"[\w.*?\[\]!-]{1,200}", re.ASCII)
_LOWER = re.compile(r"[a-z0-9_,-]{1,100}")
_DURATION = re.compile(r"[\d:]{1,20}", re.ASCII)


def is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Finite, and not too large to be meant."""
    return isinstance(value, int | float) and not is_switch(value) and abs(value) <= LARGEST


def is_size(value: Any) -> bool:
    """A count, a width, a side."""
    return isinstance(value, int) and not is_switch(value) and 0 <= value <= LARGEST_SIZE


def is_side(value: Any) -> bool:
    return is_size(value) and 0 < value <= LARGEST_SIDE


def is_depth(value: Any) -> bool:
    return is_size(value) and value <= DEEPEST


def is_processes(value: Any) -> bool:
    """How many of them; -1 for all that there can be."""
    return isinstance(value, int) and not is_switch(value) and -1 <= value <= MOST_PROCESSES


def is_byte(value: Any) -> bool:
    return is_size(value) and value < 256


def is_word(value: Any) -> bool:
    """A name without a scheme or a folder."""
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def is_text(value: Any) -> bool:
    """What is only shown, by `visible`: the name of a class."""
    return isinstance(value, str) and len(value) <= 1000


def is_below(value: Any) -> bool:
    """A path below the current folder, or the one of the data."""
    if not isinstance(value, str):
        return False
    parts = value.removesuffix("/").split("/")
    return all(_PART.fullmatch(part) and part.strip(".") for part in parts)


def matches(pattern: re.Pattern[str]) -> Kind:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def several(kind: Kind, length: int | None = None) -> Kind:
    """A list of one kind."""
    return lambda values: (
        isinstance(values, list | tuple)
        and len(values) <= LONGEST
        and (length is None or len(values) == length)
        and all(map(kind, values))
    )


def either(*kinds: Kind) -> Kind:
    return lambda value: any(kind(value) for kind in kinds)


_SIZES = either(is_size, several(is_size))
_NUMBERS = either(is_number, several(is_number))
_PLAIN = either(is_switch, is_word, _NUMBERS)
_COLOURS = several(is_number, 3)


def _named(names: str, kind: Kind) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


_BACKBONE_OPTIONS: Table = {
    **_named(
        "img_size patch_size in_chans embed_dim embed_dims dims num_heads head_dim "
        "ratio ratios sr_ratios tokens num_landmarks iters value_conv stem_stride window_size "
        "reg_tokens kernel_sizes output_stride stem_width base_width cardinality head_hidden_size",
        _SIZES,
    ),
    **_named("depth depths", either(is_depth, several(is_depth, 4))),
    **_named(
        "mlp_ratio mlp_ratios ridge drop_rate pos_drop_rate patch_drop_rate proj_drop_rate "
        "attn_drop_rate drop_block_rate init_values ls_init_value head_init_scale norm_eps",
        _NUMBERS,
    ),
    **_named(
        "tie_qk overlap pre_norm class_token no_embed_class final_norm fc_norm qkv_bias qk_norm "
        "scale_attn_norm scale_mlp_norm proj_bias pool_include_prefix dynamic_img_size "
        "dynamic_img_pad strict_img_size always_partition linear conv_mlp conv_bias use_grn "
        "head_norm_first avg_down zero_init_last fix_init fix_stem",
        is_switch,
    ),
    **_named(
        "global_pool stage4 sampler inverse pad position act_layer norm_layer pos_embed "
        "weight_init stem_type pad_type",
        is_word,
    ),
}
_DETECTOR_OPTIONS = _named(
    "score_thresh nms_thresh detections_per_img fg_iou_thresh bg_iou_thresh topk_candidates "
    "rpn_pre_nms_top_n_train rpn_pre_nms_top_n_test rpn_post_nms_top_n_train "
    "rpn_post_nms_top_n_test rpn_nms_thresh rpn_fg_iou_thresh rpn_bg_iou_thresh "
    "rpn_batch_size_per_image rpn_positive_fraction rpn_score_thresh box_score_thresh "
    "box_nms_thresh box_detections_per_img box_fg_iou_thresh box_bg_iou_thresh "
    "box_batch_size_per_image box_positive_fraction bbox_reg_weights",
    _NUMBERS,
)
_OPTIMIZER_OPTIONS = _named(
    "eps betas momentum alpha rho nesterov amsgrad centered dampening foreach fused maximize "
    "caution corrected_weight_decay trust_clip decoupled_decay",
    either(is_switch, _NUMBERS),
)
_TASK: Table = {
    **_named(
        "lr weight_decay layer_decay warmup_epochs warmup_steps warmup_lr min_lr ema seed",
        is_number,
    ),
    **_named("optimizer schedule", is_word),
    "milestones": several(is_number),
    "optimizer_options": _OPTIMIZER_OPTIONS,
    "freeze": several(matches(_PATTERN)),
}
TRAINER: Table = {
    # Not with a dot or a capital: Lightning's command line would take it for a class.
    **_named(
        "accelerator strategy precision gradient_clip_algorithm deterministic",
        either(matches(_LOWER), is_switch, is_number),
    ),
    **_named(
        "max_epochs min_epochs max_steps min_steps limit_train_batches limit_val_batches "
        "limit_test_batches limit_predict_batches overfit_batches val_check_interval "
        "check_val_every_n_epoch num_sanity_val_steps log_every_n_steps accumulate_grad_batches "
        "gradient_clip_val reload_dataloaders_every_n_epochs",
        is_number,
    ),
    **_named(
        "enable_checkpointing enable_progress_bar enable_model_summary enable_autolog_hparams "
        "benchmark inference_mode use_distributed_sampler detect_anomaly barebones sync_batchnorm "
        "logger",
        is_switch,
    ),
    "fast_dev_run": either(is_switch, is_size),
    "num_nodes": lambda value: is_processes(value) and value >= 1,
    "devices": either(is_processes, several(is_processes), lambda value: value == "auto"),
    "max_time": matches(_DURATION),
}
"""Arguments of Lightning's Trainer; callbacks, loggers, plugins and profilers are none of them."""

_DATA: Table = {
    "name": is_word,
    "root": is_below,
    **_named("train_split val_split test_split", matches(_SPLIT)),
    **_named("batch_size eval_batch_size", is_size),
    "num_workers": lambda value: is_processes(value) and value >= 0,
    "seed": is_number,
}
DATA: Mapping[str, Table] = {
    "ImageData": {
        **_DATA,
        "cache": is_switch,
        "size": is_side,
        "eval_sizes": several(is_side),
        **_named("crop_pct flip color_jitter erase", is_number),
        **_named("interpolation train_interpolation crop_mode auto_augment", is_word),
        **_named("mean std", _COLOURS),
        **_named("crop_scale crop_ratio", several(is_number, 2)),
    },
    "DetectionData": {
        **_DATA,
        "classes": several(is_text),
        "sizes": several(is_side),
        "max_size": is_side,
        **_named("flip vertical_flip color_jitter", is_number),
    },
    "SegmentationData": {
        **_DATA,
        **_named("image_folder label_folder", is_below),
        "label_suffix": is_word,
        "classes": several(is_text),
        "ignore": several(is_number),
        "palette": several(several(is_byte, 3)),
        "crop": either(is_side, several(is_side, 2)),
        "scale": several(is_number, 2),
        **_named("train_size eval_size eval_max_size", is_side),
        "photometric": is_switch,
        **_named("flip cat_max_ratio", is_number),
    },
    "SequenceData": {
        **_DATA,
        **_named("max_length pad_to train_samples val_samples", is_size),
    },
}
"""Arguments of our data modules."""

WEIGHTS = frozenset(
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
)
"""Options that say where a model's first weights come from: a checkpoint has its own."""
_NEEDLESS = {"model.init_from", "data.download"}
"""Told for the start of a run alone."""
_OF_TRAINING = {"model.teacher", "model.teacher_checkpoint", "model.results"}
"""Not needed to score, like what the trainer is given to train with."""

PREPARATION: Table = {
    **_named("size max_size", is_side),
    "classes": several(is_text),
    "crop_pct": lambda value: is_number(value) and SMALLEST_CROP <= value <= 1,
    "interpolation": lambda value: is_word(value) and value in INTERPOLATIONS,
    **_named("mean std", _COLOURS),
    "palette": several(several(is_byte, 3)),
}
"""How images are prepared and classes are called, as checkpoints tell it."""


def tasks() -> dict[str, Table]:
    """Arguments of our tasks; options of the attentions that there are now."""
    attention = {
        option: _PLAIN
        for name in ATTENTIONS
        for option in attention_options(name) - {"device", "dtype"}
    }
    backbone: Table = {
        **_TASK,
        **_named("backbone attention", is_word),
        **_named("num_classes", is_size),
        "tie_qk": is_switch,
        "drop_path": is_number,
        "options": {**_BACKBONE_OPTIONS, "attention": is_word, "attention_options": attention},
    }
    colours = _named("mean std", _COLOURS)
    return {
        "Classification": {
            **backbone,
            **_named("mixup cutmix mix_prob smoothing distillation_weight temperature", is_number),
            "distillation": is_word,
        },
        "Detection": {
            **backbone,
            **colours,
            "detector": is_word,
            "width": is_size,
            **_named("size max_size", is_side),
            "detector_options": _DETECTOR_OPTIONS,
        },
        "Segmentation": {
            **backbone,
            **colours,
            "decoder": is_word,
            **_named("width window step", is_size),
            "auxiliary": is_number,
        },
        "SequenceClassification": {
            **_TASK,
            "attention": is_word,
            "options": attention,
            **_named("num_classes vocabulary length dim hidden num_heads", is_size),
            "depth": is_depth,
            "pairs": is_switch,
            "dropout": is_number,
        },
    }


def plain(values: Mapping[Any, Any], table: Table, prefix: str) -> tuple[dict[str, Any], list[str]]:
    """What of a mapping is on the list, and the names of what is not, below a prefix.

    Nothing, such as None, may stand for anything.
    """
    taken: dict[str, Any] = {}
    others: list[str] = []
    for name, value in values.items():
        kind = table.get(name)
        if isinstance(kind, Mapping) and isinstance(value, Mapping):
            taken[name], inner = plain(value, kind, f"{prefix}{name}.")
            others += inner
        elif kind and (value is None or (callable(kind) and kind(value))):
            taken[name] = value
        elif value not in (None, False, [], {}):
            others.append(f"{prefix}{name}")
    return taken, others


def model_arguments(task: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a checkpoint's model; refuses those that are not on the list.

    Args:
        task: Name of the class that trained it.
        given: Its hyper_parameters.
        names: Of the arguments that are wanted.
    """
    given = given if isinstance(given, Mapping) else {}
    if given.get("num_classes") is None:
        raise UserError("the checkpoint does not tell of its model's classes: it is damaged")
    wanted = {name: given[name] for name in names if name in given}
    return _refusing(wanted, tasks()[task], "the model")


def preparation(given: Any, num_classes: int, *needed: str) -> dict[str, Any]:
    """How a checkpoint says that images are prepared, and what its classes are called."""
    found = _refusing(given, PREPARATION, "images") if isinstance(given, Mapping) else {}
    for name in ("classes", "palette"):
        if found.get(name) is not None and len(found[name]) != num_classes:
            raise UserError(
                f"the checkpoint has {len(found[name])} {name} for num_classes={num_classes}: it "
                "is damaged"
            )
    if missing := [name for name in needed if found.get(name) is None]:
        raise UserError(
            f"the checkpoint does not tell {', '.join(missing)}: it is damaged, or none that "
            "`softmaxfree fit` has written"
        )
    return found


def built(make: Callable[[], Model], state: Any) -> Model:
    """A model with a checkpoint's weights, in evaluation.

    It is built without memory first: a file cannot tell of a model that is much larger than its
    weights.

    Args:
        make: What builds it.
        state: The weights.
    """
    try:
        with torch.device("meta"):
            told = sum(tensor.numel() for tensor in make().state_dict().values())
        stored = sum(tensor.numel() for tensor in state.values())
        if told > 2 * stored + 2**20:
            raise UserError(
                f"the checkpoint tells of a model of {told:,} numbers and has {stored:,}: it is "
                "damaged"
            )
        model = make()
        model.load_state_dict(state)
    except UserError:
        raise
    except Exception as error:  # whatever wrong values make torch and timm raise
        reason = str(error).strip().split("\n")[0][:300].rstrip(".:")
        raise UserError(
            f"no model can be built of what the checkpoint tells ({type(error).__name__}: "
            f"{reason}): it is damaged, or none that `softmaxfree fit` has written"
        ) from error
    return model.eval()


def _refusing(given: Mapping[Any, Any], table: Table, what: str) -> dict[str, Any]:
    taken, others = plain(given, table, "")
    if refused := [name for name in others if name.rpartition(".")[2] not in WEIGHTS]:
        raise UserError(
            f"the checkpoint tells {visible(', '.join(refused))} of {what}, which "
            f"{'are' if len(refused) > 1 else 'is'} not taken from a file: only plain values of "
            "known options are"
        )
    return taken


def read_yaml(text: str, path: Path) -> dict[Any, Any]:
    """A checkpoint's configuration; refuses one that is none.

    Args:
        path: Of the checkpoint, for messages.
    """
    try:
        if len(text) > LONGEST_TEXT:
            raise ValueError("too long")
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(
            f"the configuration in {path} cannot be read: give another with --config"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"the configuration in {path} is none: give another with --config")
    return config


def configuration(
    config: Mapping[Any, Any], path: Path, command: str, arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """What of a checkpoint's configuration is taken, and what is left out of it.

    Args:
        config: As YAML has it.
        path: Of the checkpoint, for messages.
        command: fit, validate or test.
        arguments: The command line: what is given there need not be on the list.

    Raises:
        UserError: For what has to be given again.
    """
    top: Table = {"seed_everything": is_number, "save_every": is_number, "trainer": TRAINER}
    parts = {"model": ("softmaxfree.tasks", tasks()), "data": ("softmaxfree.data", DATA)}
    taken, others = plain({k: v for k, v in config.items() if k not in parts}, top, "")
    if command != "fit":  # on whatever machine this is
        taken.pop("save_every", None)
        for name in ("devices", "num_nodes", "strategy"):
            taken.get("trainer", {}).pop(name, None)
    for part, (package, known) in parts.items():
        taken[part], inner = _built(config.get(part), package, known, part, path)
        others += inner
    needless = _NEEDLESS | {f"model.options.{name}" for name in WEIGHTS}
    others = [name for name in others if name not in needless and not _is_given(name, arguments)]
    left = [
        name
        for name in others
        if command != "fit" and (name in _OF_TRAINING or name.startswith("trainer."))
    ]
    if again := [f"--{name}" for name in others if name not in left]:
        raise UserError(
            f"{path} was trained with {visible(' and '.join(again[:6]))}, which "
            f"{'are' if len(again) > 1 else 'is'} not taken from a file: give "
            f"{'them' if len(again) > 1 else 'it'} again, or the run's --config if you trust it"
        )
    return taken, left


def _built(
    given: Any, package: str, known: Mapping[str, Table], part: str, source: Path
) -> tuple[dict[str, Any], list[str]]:
    """One of our classes and its arguments, and the names of those that are not on the list."""
    given = given if isinstance(given, Mapping) else {}
    path = str(given.get("class_path"))
    name = path.rpartition(".")[2]
    extra = set(given) - {"class_path", "init_args"}
    if name not in known or extra or not re.fullmatch(rf"{re.escape(package)}(\.\w+)?\.\w+", path):
        raise UserError(
            f"the {part} of {source} is a {visible(path)[:100]}, which is not built because a file "
            "names it: give the run's --config if you trust it"
        )
    arguments = given.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        arguments = {"init_args": arguments}
    taken, others = plain(arguments, known[name], f"{part}.")
    return {"class_path": f"{package}.{name}", "init_args": taken}, others


def _is_given(name: str, arguments: Sequence[str]) -> bool:
    """Whether the command line has an option, one below it, or the options that it is one of."""
    first, *middle = name.split(".")[:-1] or [name]
    above = [".".join([first, *middle[: i + 1]]) for i in range(len(middle))]
    options = [
        word[2:].partition("=")[0].replace(".init_args.", ".", 1)
        for word in arguments
        if word.startswith("--")
    ]
    return any(
        option in (name, *above) or option.startswith((f"{name}.", f"{name}+"))
        for option in options
    )
