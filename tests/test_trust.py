"""What is taken from a file: the list, and what is not on it."""

import inspect
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from softmaxfree import data, tasks
from softmaxfree.allow_list import DATA, is_below, is_number, is_size, is_word
from softmaxfree.allow_list import tasks as task_tables
from softmaxfree.data.base import Data
from softmaxfree.errors import UserError, visible
from softmaxfree.models.build import BackboneConfig, build_model
from softmaxfree.trust import built, configuration, model_arguments, preparation, read_yaml

RECIPES = {
    path.stem: config
    for path in sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))
    if {"class_path"} <= (config := yaml.safe_load(path.read_text())).get("model", {}).keys()
}
"""Those that are whole, not to be added to another."""
FILE = Path("file.ckpt")
BY_THE_USER_ALONE = {"init_checkpoint", "teacher", "results", "download"}


def parameters(kind: type) -> set[str]:
    found = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    own = {name for name, p in found.items() if p.kind is not p.VAR_KEYWORD} - {"self"}
    return own | (parameters(tasks.Task) if "task" in found else set())


def small(**changes: Any) -> dict[str, Any]:
    """A configuration, with values by place, such as data.init_args.root."""
    config: dict[str, Any] = {
        "seed_everything": 0,
        "save_every": 500,
        "trainer": {"max_epochs": 2, "callbacks": [], "logger": None},
        "model": {
            "class_path": "softmaxfree.tasks.Classification",
            "init_args": {
                "backbone": "softpp_nano",
                "num_classes": 10,
                "options": {"num_landmarks": 49},
            },
        },
        "data": {"class_path": "softmaxfree.data.ImageData", "init_args": {"name": "digits"}},
    }
    for place, value in changes.items():
        *parts, last = place.split("/")
        inner = config
        for part in parts:
            inner = inner[part]
        inner[last] = value
    return config


@pytest.mark.parametrize("name", tasks.__all__[:-1])
def test_every_argument_of_a_task_is_decided_about(name: str) -> None:
    assert parameters(getattr(tasks, name)) - BY_THE_USER_ALONE == set(task_tables()[name])


@pytest.mark.parametrize("name", data.__all__)
def test_every_argument_of_a_data_module_is_decided_about(name: str) -> None:
    kind = getattr(data, name)
    assert issubclass(kind, Data)
    assert parameters(kind) - BY_THE_USER_ALONE == set(DATA[name])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_runs_of_all_recipes_are_read_whole(name: str, command: str) -> None:
    config = {key: value for key, value in RECIPES[name].items() if key != "save_every"}
    here = () if command == "fit" else ("devices", "num_nodes", "strategy")
    config["trainer"] = {k: v for k, v in config["trainer"].items() if k not in here}
    assert configuration(config, FILE, command, []) == (config, [])


@pytest.mark.parametrize(
    ("place", "value", "option"),
    [
        ("data/init_args/name", "wds/", "--data.name"),
        ("data/init_args/name", "hfds/somebody/images", "--data.name"),
        ("data/init_args/name", "torch/cifar10", "--data.name"),
        ("data/init_args/root", "pipe:touch canary", "--data.root"),
        ("data/init_args/root", "/etc", "--data.root"),
        ("data/init_args/root", "a/../../b", "--data.root"),
        ("data/init_args/root", "https://example.org/data", "--data.root"),
        ("data/init_args/val_split", "../other", "--data.val_split"),
        ("data/init_args/val_split", "x.tar|pipe:id", "--data.val_split"),
        ("data/init_args/root", {"class_path": "os.system"}, "--data.root"),
        ("model/init_args/backbone", "hf-hub:somebody/model", "--model.backbone"),
        ("model/init_args/options", {"features_only": True}, "--model.options.features_only"),
        ("model/init_args/options", {"scriptable": True}, "--model.options.scriptable"),
        ("model/init_args/options", {"num_landmarks": "49"}, "--model.options.num_landmarks"),
        ("model/init_args/options", "options.yaml", "--model.options"),
        ("model/init_args/optimizer_options", {"opt": "sgd"}, "--model.optimizer_options.opt"),
        ("model/init_args/lr", math.inf, "--model.lr"),
        ("model/init_args/lr", 10**400, "--model.lr"),
        ("model/init_args/dict_kwargs", {"a": 1}, "--model.dict_kwargs"),
        ("config", "other.yaml", "--config"),
        ("out", "/tmp/elsewhere", "--out"),
        ("checkpoint", "other.ckpt", "--checkpoint"),
    ],
)
def test_what_is_not_plain_is_given_again(place: str, value: Any, option: str) -> None:
    config = small(**{place: value})
    for command in ("fit", "validate", "test"):
        with pytest.raises(UserError, match=f"file.ckpt was trained with {option}, which is not"):
            configuration(config, FILE, command, [])
        taken, _ = configuration(config, FILE, command, [f"{option}=mine"])
        text = yaml.safe_dump(taken)
        assert str(value) not in text or value == "49"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("trainer/callbacks", [{"class_path": "evil.Callback"}]),
        ("trainer/profiler", {"class_path": "lightning.pytorch.profilers.SimpleProfiler"}),
        ("trainer/logger", {"class_path": "evil.Logger"}),
        ("trainer/plugins", ["evil.Plugin"]),
        ("trainer/strategy", {"class_path": "evil.Strategy"}),
        ("trainer/strategy", "evil.Strategy"),
        ("trainer/accelerator", "CPUAccelerator"),
        ("trainer/default_root_dir", "/tmp/elsewhere"),
        ("model/init_args/teacher", "hf-hub:somebody/model"),
        ("model/init_args/results", "/tmp/elsewhere.json"),
    ],
)
def test_what_trains_is_left_out_of_scoring_and_given_again_to_go_on(
    place: str, value: Any
) -> None:
    config, option = small(**{place: value}), place.replace("/", ".").replace(".init_args", "")
    taken, left = configuration(config, FILE, "validate", [])
    assert left == [option]
    assert "evil" not in str(taken)
    assert "elsewhere" not in str(taken)
    with pytest.raises(UserError, match=f"--{option}, which is not taken from a file"):
        configuration(config, FILE, "fit", [])
    assert configuration(config, FILE, "fit", [f"--{option}", "mine"])[1] == []


def test_a_file_does_not_start_processes() -> None:
    told = {"devices": 8, "num_nodes": 2, "strategy": "ddp", "precision": "bf16-mixed"}
    config = small(trainer=told)
    assert configuration(config, FILE, "fit", [])[0]["trainer"] == told
    taken, left = configuration(config, FILE, "validate", [])
    assert (taken["trainer"], left) == ({"precision": "bf16-mixed"}, [])
    for place in ("trainer/devices", "trainer/num_nodes", "data/init_args/num_workers"):
        with pytest.raises(UserError, match=r"not taken from a file"):
            configuration(small(**{place: 10**6}), FILE, "fit", [])


def test_first_weights_are_not_looked_for_again() -> None:
    sources = {"pretrained": True, "checkpoint_path": "a.pth", "pretrained_cfg": {"url": "x"}}
    options = {"num_landmarks": 49, **sources}
    config = small(
        **{"model/init_args/options": options, "model/init_args/init_checkpoint": "/a.ckpt"}
    )
    for command in ("fit", "validate"):
        taken, left = configuration(config, FILE, command, [])
        assert taken["model"]["init_args"]["options"] == {"num_landmarks": 49}
        assert "init_checkpoint" not in taken["model"]["init_args"]
        assert left == []


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("model", {"class_path": "evil.Task", "init_args": {}}),
        ("model", {"class_path": "evil.Classification"}),
        ("model", {"class_path": "softmaxfree.tasks.evil.there.Classification"}),
        ("model", {"class_path": "softmaxfree.tasks.Task"}),
        ("model", "evil.yaml"),
        ("data", {"class_path": "softmaxfree.data.ImageData", "dict_kwargs": {"a": 1}}),
        ("data", None),
    ],
)
def test_a_class_of_ones_own_needs_ones_own_configuration(part: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"the {part} of file.ckpt is a .* give the run's --config"):
        configuration(small(**{part: value}), FILE, "validate", [f"--{part}", "mine"])


def test_options_count_as_given_with_those_above_and_below_them() -> None:
    config = small(**{"model/init_args/options": {"block_fn": "evil.Block"}})
    for given in ("--model.options", "--model.init_args.options.block_fn=1", "--model.options={}"):
        taken, _ = configuration(config, FILE, "fit", [given])
        assert taken["model"]["init_args"]["options"] == {}
    for given in (
        "--model",
        "--model.option",
        "--model.options.block",
        "--model.options.block_fns",
    ):
        with pytest.raises(UserError, match=r"--model\.options\.block_fn"):
            configuration(config, FILE, "fit", [given])
    added = small(**{"trainer/callbacks": ["evil.Callback"]})
    configuration(added, FILE, "fit", ["--trainer.callbacks+=mine.Callback"])


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch canary']",
        "a: [",
        "[" * 500,
        "- a list",
        "words",
        "a: " + "b" * 2**21,
        "",
        # What yaml's constructors raise.
        "a: !!bool x",
        "a: !!int ''",
        "a: !!float ''",
        "a: !!timestamp foo",
        # A mapping of itself, and mappings of ten times the one before, which were built for ever.
        "&a {model: *a}",
        "a0: &a0 {k: 1}\n"
        + "\n".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9)),
    ],
    ids=range(13),
)
def test_a_configuration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"the configuration in file.ckpt cannot be read"):
        read_yaml(text, FILE)


def test_kinds() -> None:
    assert [value for value in (0, -1.5, True, "1", math.nan, None) if is_number(value)] == [
        0,
        -1.5,
    ]
    assert [value for value in (0, 7, -1, 2.0, 2**40, False) if is_size(value)] == [0, 7]
    words = ["", "softpp_nano.cifar10", "a/b", "hf-hub:x", "a b", "a\n", "é", 3, "rand-m9-mstd0.5"]
    assert [word for word in words if is_word(word)] == [words[0], words[1], words[-1]]
    paths = ["a", "a/b", "images/{split}", "..", "a/..", ".", "/a", "~", "C:/a", "a|b", "", "a//b"]
    assert [path for path in paths if is_below(path)] == paths[:3]


def test_a_model_is_built_of_plain_values() -> None:
    given = {
        "backbone": "softpp_nano", "num_classes": 3, "_instantiator": "evil.make", "lr": 1.0,
        "options": {"num_landmarks": 4, "checkpoint_path": "evil.pth",
                    "pretrained_cfg_overlay": {"a": 1}},
    }  # fmt: skip
    names = ("backbone", "num_classes", "options")
    taken = model_arguments("Classification", given, names)
    assert taken == {"backbone": "softpp_nano", "num_classes": 3, "options": {"num_landmarks": 4}}
    for name, value in {
        "norm_layer": {"class_path": "evil.Norm"}, "features_only": True, "out_indices": [0],
        "foo": torch.zeros(3),
        "depths": [10**6] * 4, "attention_options": {"device": "cuda"}, "num_landmarks": "4",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=f"sets options.{name}.* not taken from a file"):
            model_arguments("Classification", {**given, "options": {name: value}}, names)


_WINDOW = {"window_size": 64, "img_size": 256, "depths": [1, 1, 1, 1]}
"""Each block has an index of 64^4 numbers, which are not among its weights."""


def test_a_model_that_is_larger_than_its_weights_is_not_built() -> None:
    """70 billion numbers: it would take 280 GB."""
    state = build_model("softpp_nano", 10).state_dict()
    options = {"embed_dims": [2**16] * 4, "num_heads": [1] * 4}
    with pytest.raises(UserError, match=r"describes a model of [\d,]{14,} numbers, but has"):
        built(lambda: build_model(BackboneConfig("softpp_nano", options=options), 10), state)
    with pytest.raises(UserError, match="no model can be built from the checkpoint"):
        built(lambda: torch.nn.Linear("wide", 1), state)  # type: ignore[arg-type]
    for options, shared in (({}, True), (_WINDOW, False)):
        swin = BackboneConfig("swin_tiny_patch4_window7_224", options=options)
        with torch.device("meta"):
            shapes = {name: x.shape for name, x in build_model(swin, 10).state_dict().items()}
        most = torch.empty(max(shape.numel() for shape in shapes.values()))
        state = {
            name: most[: shape.numel()].view(shape) if shared else torch.empty(shape)
            for name, shape in shapes.items()
        }
        with pytest.raises(UserError, match=r"describes a model of [\d,]{10,} numbers, but has"):
            built(partial(build_model, swin, 10), state)


def test_a_model_has_its_weights() -> None:
    state = build_model("softpp_nano", 10).state_dict()
    model = built(lambda: build_model("softpp_nano", 10), state)
    assert not model.training
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())


def test_how_images_are_prepared_is_checked() -> None:
    told = {"size": 32, "classes": ["a", "b"], "mean": [0.5] * 3, "crop_pct": 1.0}
    assert preparation(told, 2, "size", "mean") == told
    with pytest.raises(UserError, match="2 classes for num_classes=3"):
        preparation(told, 3)
    with pytest.raises(UserError, match="has no crop_pct"):  # divided by
        preparation({**told, "crop_pct": 0}, 2, "crop_pct")
    with pytest.raises(UserError, match="has no std"):
        preparation(told, 2, "mean", "std")
    wrong = [
        ("size", 10**6), ("mean", "x"), ("classes", [1, 2]), ("evil", 1),
        # Some of these ended in OverflowError and KeyError.
        ("std", [0, 1, 1]),
        ("crop_pct", 1e-320), ("crop_pct", -1), ("crop_pct", 2), ("interpolation", "evil"),
    ]  # fmt: skip
    for name, value in wrong:
        with pytest.raises(UserError, match=f"sets {name} of images"):
            preparation({**told, name: value}, 2)


def test_letters_that_steer_a_terminal_are_spelt_out() -> None:
    assert visible("cat é 猫") == "cat é 猫"
    assert visible("\x1b[2J\x1b]0;title\x07\ncat\r\x9b") == r"\x1b[2J\x1b]0;title\x07\ncat\r\x9b"
    assert visible("\u202ecat\udcff") == r"\u202ecat\udcff"
