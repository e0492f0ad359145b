"""What may be taken from a checkpoint: options by name, and the values that each may have.

A kind is a function that says whether a value may be taken. A table has a kind for each name, or
the table of a mapping. `trust.py` applies the tables.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from .layers.registry import ATTENTIONS, attention_options

Kind = Callable[[Any], bool]
Table = Mapping[str, Any]

LARGEST = 2**53
LARGEST_SIZE = 2**20
LARGEST_SIDE = 2**12
"""The largest image side in pixels that a checkpoint may ask for."""
SMALLEST_CROP = 0.1
"""The smallest part of a resized image's side that a crop may keep; the largest is 1."""
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
"""How images may be resized, by timm's names."""
MOST_PROCESSES = 64
"""The most processes that train or load data."""
DEEPEST = 1000
"""The most layers of a model."""
LONGEST = 10_000
"""The most entries of a list."""
_WORD = re.compile(r"[\w.+-]{0,100}", re.ASCII)
_PART = re.compile(r"[\w{} .+-]{1,100}", re.ASCII)
_SPLIT = re.compile(r"[\w-]{0,100}(/[\w-]{1,100})*", re.ASCII)
_PATTERN = re.compile(r"[\w.*?\[\]!-]{1,200}", re.ASCII)
_LOWER = re.compile(r"[a-z0-9_,-]{1,100}")
_DURATION = re.compile(r"[\d:]{1,20}", re.ASCII)


def is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite number of plausible size."""
    return isinstance(value, int | float) and not is_switch(value) and abs(value) <= LARGEST


def is_size(value: Any) -> bool:
    """A count, a width or a side."""
    return isinstance(value, int) and not is_switch(value) and 0 <= value <= LARGEST_SIZE


def is_side(value: Any) -> bool:
    return is_size(value) and 0 < value <= LARGEST_SIDE


def is_depth(value: Any) -> bool:
    return is_size(value) and value <= DEEPEST


def is_processes(value: Any) -> bool:
    """A number of processes; -1 stands for all."""
    return isinstance(value, int) and not is_switch(value) and -1 <= value <= MOST_PROCESSES


def is_byte(value: Any) -> bool:
    return is_size(value) and value < 256


def is_word(value: Any) -> bool:
    """A name without a scheme or a folder."""
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def is_text(value: Any) -> bool:
    """Text that is only displayed, by `visible`: the name of a class."""
    return isinstance(value, str) and len(value) <= 1000


def is_below(value: Any) -> bool:
    """A relative path that stays below its folder."""
    if not isinstance(value, str):
        return False
    parts = value.removesuffix("/").split("/")
    return all(_PART.fullmatch(part) and part.strip(".") for part in parts)


def matches(pattern: re.Pattern[str]) -> Kind:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def several(kind: Kind, length: int | None = None) -> Kind:
    """A list whose entries are all of one kind."""
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
_COLOURS: Table = {
    "mean": several(is_number, 3),
    "std": several(lambda value: is_number(value) and value > 0, 3),  # divided by
}


def _named(names: str, kind: Kind) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


_BACKBONE_OPTIONS: Table = {
    **_named(
        "img_size patch_size in_chans embed_dim embed_dims dims num_heads head_dim "
        "ratio ratios sr_ratios num_landmarks iters value_conv stem_stride window_size "
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
    # Without dots and capitals: Lightning's command line would take those for a class.
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
"""Arguments of Lightning's Trainer, without callbacks, loggers, plugins and profilers."""

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
        **_COLOURS,
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

PREPARATION: Table = {
    **_named("size max_size", is_side),
    "classes": several(is_text),
    "crop_pct": lambda value: is_number(value) and SMALLEST_CROP <= value <= 1,
    "interpolation": lambda value: is_word(value) and value in INTERPOLATIONS,
    **_COLOURS,
    "palette": several(several(is_byte, 3)),
}
"""The preparation of images and the names of classes."""


def tasks() -> dict[str, Table]:
    """Arguments of our tasks, with the options of all attentions registered now."""
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
    return {
        "Classification": {
            **backbone,
            **_named("mixup cutmix mix_prob smoothing distillation_weight temperature", is_number),
            "distillation": is_word,
        },
        "Detection": {
            **backbone,
            **_COLOURS,
            "detector": is_word,
            "width": is_size,
            **_named("size max_size", is_side),
            "detector_options": _DETECTOR_OPTIONS,
        },
        "Segmentation": {
            **backbone,
            **_COLOURS,
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
