"""Recipes parse, every published model is built from its options, and each recipe runs one step."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import softmaxfree.tasks
from softmaxfree.data.sources import Digits, Source, open_source
from softmaxfree.lab import paper
from softmaxfree.lab.paper import ARCHITECTURE, IMAGENET, LANDMARKS, LINEARISATION, SAMPLERS, TIED
from softmaxfree.lab.paper import LRA as LRA_PAPER
from softmaxfree.training.command import TrainingCLI, run

from ..data.test_sequences import write_contours, write_papers, write_reviews

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
WHOLE = sorted(path for path in RECIPES.rglob("*.yaml") if "seed_everything" in path.read_text())
"""Recipes that train by themselves; the others are given after one of these."""
LRA = [path for path in WHOLE if path.parent.name == "lra"]
PAPER_TOP1 = {
    **{row.title: row.top1 for row in IMAGENET if row.family in ("SOFT", "SOFT++")},
    "SOFT++ without a pyramid": ARCHITECTURE["pyramid"][1],
    "SOFT++-Tiny, patches that do not overlap": ARCHITECTURE["overlap"][1],
    "ViT-Small/16 with queries = keys": TIED["ViT"][1],
    "Swin-T with queries = keys": TIED["Swin"][1],
}
PAPER_MIOU = {
    data.lower(): {
        backbone.removeprefix("softpp_").title(): str(row.miou)
        for backbone, row in printed.rows.items()
        if row.miou is not None
    }
    for data, printed in paper.SEGMENTATION.items()
}
PAPER_AP = {
    f"{title} on SOFT++-{backbone.removeprefix('softpp_').title()}": (
        f"{row.ap} AP ({row.ap50} AP50, {row.ap75} AP75)"
        if row.mask_ap is None
        else f"{row.ap} box AP, {row.mask_ap} mask AP"
    )
    for title, detector in (("RetinaNet", "retinanet"), ("Mask R-CNN", "mask_rcnn"))
    for backbone, row in paper.DETECTION[detector].items()
}


def rows(section: str, columns: int) -> list[list[str]]:
    """Rows of the tables with this many columns in a section of docs/recipes.md."""
    page = (ROOT / "docs/recipes.md").read_text()
    (text,) = [part for part in page.split("\n## ") if part.startswith(section)]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if len(line) == columns][2:]


def options(cell: str) -> list[str]:
    """The command-line options in a cell; one that starts with "none" has none."""
    return [] if cell.startswith("none") else shlex.split(cell.strip("`"))


IMAGENET_ROWS = rows("ImageNet", 4)
COCO_ROWS = [row for row in rows("COCO", 3) if row[0] in PAPER_AP]
SEGMENTATION_ROWS = rows("ADE20K", 4)
PUBLISHED = [
    *(("imagenet/paper", name, options(cell)) for name, cell, _, _ in IMAGENET_ROWS),
    *(("detection/coco", name, options(cell)) for name, cell, _ in COCO_ROWS),
    *(
        (f"segmentation/{re.findall(r'`(.*?).yaml`', file)[0]}", name, options(cell))
        for file, name, cell, _ in SEGMENTATION_ROWS
    ),
]
"""Recipe, model and options of each of the paper's numbers."""


class Parsed(TrainingCLI):
    """Stops when the configuration is read and checked."""

    def instantiate_classes(self) -> None:
        raise StopIteration


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> TrainingCLI:
    """The command line of `fit`; its parser serves all recipes."""
    cli = Parsed.__new__(Parsed)
    folder = tmp_path_factory.mktemp("parsed") / "run"
    with pytest.raises(StopIteration):
        cli.__init__(  # type: ignore[misc]
            "fit", ["--config", str(RECIPES / "digits/softpp_nano.yaml"), "--out", str(folder)]
        )
    return cli


def parse(cli: TrainingCLI, names: list[str], changes: list[str] | None = None) -> Any:
    words = [f"--config={RECIPES / name}.yaml" for name in names]
    return cli.parser.parse_args([*words, *(changes or [])])


def build(config: Any) -> torch.nn.Module:
    """The configuration's model with one block in each stage, without memory."""
    task = getattr(softmaxfree.tasks, config.model.class_path.rpartition(".")[2])
    arguments = config.model.init_args.as_dict()
    if "backbone" in arguments:
        depth = {"depth": 1} if "vit" in arguments["backbone"] else {"depths": [1, 1, 1, 1]}
        arguments["options"] = {**(arguments["options"] or {}), **depth}
    with torch.device("meta"):
        built: torch.nn.Module = task(**arguments)
    return built


@pytest.mark.slow
def test_every_published_model_is_built_from_its_options(cli: TrainingCLI) -> None:
    """And recipes of the paper differ only in the model."""
    assert [len(table) for table in (IMAGENET_ROWS, COCO_ROWS, SEGMENTATION_ROWS)] == [23, 8, 7]
    own = {
        "backbone",
        "attention",
        "tie_qk",
        "drop_path",
        "options",
        "detector",
        "decoder",
        "width",
    }
    bases = {name: parse(cli, [name]) for name in {name for name, _, _ in PUBLISHED}}
    models = set()
    for name, title, changes in PUBLISHED:
        config, base = parse(cli, [name], changes), bases[name]
        assert config.trainer == base.trainer
        assert config.data == base.data
        given, others = config.model.init_args.as_dict(), base.model.init_args.as_dict()
        differing = {key for key in given if given[key] != others[key]}
        assert differing <= own, title
        models.add((name, title, str(sorted((key, given[key]) for key in own & given.keys()))))
        assert sum(tensor.numel() for tensor in build(config).parameters()) > 1e6
    assert len({(name, model) for name, _, model in models}) == len(PUBLISHED)


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_parses_and_its_model_is_built(recipe: Path, cli: TrainingCLI) -> None:
    config = parse(cli, [str(recipe.relative_to(RECIPES).with_suffix(""))])
    assert build(config).monitor in ("val/accuracy", "val/AP", "val/mIoU")


def test_published_scores_are_the_papers() -> None:
    attentions = {"softmax": "softmax", "linformer": "Linformer", "performer": "Performer",
                  "nystromformer": "Nyströmformer"}  # fmt: skip
    samplers = {"avg": "averages", "random": "random tokens", "biased": "the first tokens"}
    expected = dict(PAPER_TOP1)
    for name, title in attentions.items():
        expected[f"SOFT++-Tiny's pyramid with {title}"] = LINEARISATION[name]["top1"]
    for name, title in samplers.items():
        expected[f"SOFT++-Tiny, {title} as landmarks"] = SAMPLERS[name]["top1"]
    for number, row in LANDMARKS.items():
        every = " in every stage" if number == 36 else ""
        expected[f"SOFT++-Tiny, {number} landmarks{every}"] = row["top1"]
    assert {name: float(top1) for name, _, _, top1 in IMAGENET_ROWS} == expected
    assert {name: score for name, _, score in COCO_ROWS} == PAPER_AP
    for file, name, _, score in SEGMENTATION_ROWS:
        scores = PAPER_MIOU["ade20k" if "ade20k" in file else "cityscapes"]
        assert score == scores.get(name.rpartition("SOFT++-")[2], "not in the paper")


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_says_command_hardware_duration_and_score(recipe: Path) -> None:
    lines = recipe.read_text().splitlines()
    header = "\n".join(line for line in lines if line.startswith("#"))
    for word in ("command:", "hardware:", "duration:", "score:"):
        assert word in header
    assert max(map(len, lines)) <= 100
    if recipe.parent.name not in ("digits", "images"):  # the defaults, without --config
        assert f"recipes/{recipe.parent.name}/{recipe.name}" in header
    if recipe.stem in LRA_PAPER["soft"] and recipe in LRA:
        assert f"{LRA_PAPER['soft'][recipe.stem]:.2f} % in the paper (SOFT)" in header


def test_recipes_of_the_long_range_arena_are_the_benchmarks() -> None:
    steps = {"listops": 5000, "text": 20_000, "retrieval": 30_000, "image": 35_000,
             "pathfinder": 62_400}  # fmt: skip
    assert {path.stem for path in LRA} == steps.keys()
    for path in LRA:
        recipe = yaml.safe_load(path.read_text())
        arguments = recipe["model"]["init_args"]
        assert recipe["trainer"]["max_steps"] == steps[path.stem]
        assert arguments["lr"] == 1e-4
        assert arguments["weight_decay"] == 0
        assert arguments["schedule"] == "one_cycle"
        pixels = path.stem in ("image", "pathfinder")
        assert recipe["data"]["init_args"]["batch_size"] == (256 if pixels else 32)
        length = {"listops": 2000, "text": 4000, "retrieval": 4000}.get(path.stem, 1024)
        assert arguments["length"] == length


def test_detection_recipe_is_the_papers() -> None:
    recipe = yaml.safe_load((RECIPES / "detection/coco.yaml").read_text())
    arguments = recipe["model"]["init_args"]
    assert {name: arguments[name] for name in ("optimizer", "lr", "weight_decay")} == {
        "optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.01
    }  # fmt: skip
    assert recipe["data"]["init_args"]["batch_size"] == 16
    assert recipe["trainer"]["max_epochs"] == 12


@pytest.mark.parametrize(("name", "steps", "crop"), [("ade20k", 160_000, 512),
                                                     ("cityscapes", 40_000, 768)])  # fmt: skip
def test_segmentation_recipes_are_the_papers(name: str, steps: int, crop: int) -> None:
    recipe = yaml.safe_load((RECIPES / f"segmentation/{name}.yaml").read_text())
    arguments = recipe["model"]["init_args"]
    assert recipe["trainer"]["max_steps"] == steps
    assert recipe["data"]["init_args"]["crop"] == crop
    assert recipe["data"]["init_args"]["batch_size"] == 16
    assert {name: arguments[name] for name in ("optimizer", "lr", "schedule")} == {
        "optimizer": "adamw", "lr": 6e-4, "schedule": "poly"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "trainer", "model", "data"),
    [
        ("3x", {"max_epochs": 36}, {"milestones": [27, 33]}, {}),
        ("multiscale", {}, {}, {"sizes": [*range(480, 801, 32)]}),
        ("frozen_bn", {"sync_batchnorm": False}, {"freeze": ["backbone.body.*.bn"]}, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schedule_scales_and_frozen_norms_are_a_second_configuration(
    change: str, trainer: dict[str, Any], model: dict[str, Any], data: dict[str, Any],
    cli: TrainingCLI,
) -> None:  # fmt: skip
    config = parse(cli, ["detection/coco", f"detection/{change}"])
    before = parse(cli, ["detection/coco"])
    changes = {"trainer": trainer, "model.init_args": model, "data.init_args": data}
    for place, changed in changes.items():
        now, then = config[place], before[place]
        assert {name: now[name] for name in changed} == changed
        others = [name for name in vars(now) if name not in changed]
        assert all(now[name] == then[name] for name in others)


def test_sharded_training_is_a_configuration(cli: TrainingCLI) -> None:
    """It needs GPUs to run; here it is read, and its strategy built."""
    from lightning.pytorch.strategies import FSDPStrategy

    words = [f"--config={RECIPES / name}.yaml" for name in ("imagenet/paper", "fsdp")]
    config = cli.parser.parse_args([*words, "--model.backbone=softpp_large"])
    assert config.model.init_args.ema is None
    assert config.model.init_args.backbone == "softpp_large"
    strategy = cli.parser.instantiate(config).trainer.strategy
    assert isinstance(strategy, FSDPStrategy)
    assert strategy.sharding_strategy.name == "FULL_SHARD"


HERE = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto",
        "--trainer.precision=32", "--data.batch_size=2", "--data.num_workers=0",
        "--trainer.fast_dev_run=1", "--out=run"]  # fmt: skip
Step = Callable[[Path | None, list[str], list[str]], None]
SHALLOW = "--model.options.depths=[1,1,1,1]"


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
         capsys: pytest.CaptureFixture[str]) -> Step:  # fmt: skip
    """Runs one step of training and validation of a recipe, with changes that make it small."""
    monkeypatch.chdir(tmp_path)

    def run_step(root: Path | None, names: list[str], changes: list[str]) -> None:
        if root:
            monkeypatch.setenv("SOFTMAXFREE_DATA", str(root))
        words = [f"--config={RECIPES / name}.yaml" for name in names]
        run("fit", [*words, *HERE, *changes])
        assert "one step of training and validation went through" in capsys.readouterr().out
        assert not Path("run").exists()

    return run_step


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image folders of ten classes, under the names that recipes look for."""
    root = tmp_path_factory.mktemp("folders")
    image, _ = Digits("train").load(0)
    for split in ("train", "val", "test"):
        for number in range(10):
            folder = root / "imagenet" / split / f"c{number}"
            folder.mkdir(parents=True)
            image.resize((64, 64)).save(folder / "image.png")
    for name in ("cifar10", "cifar10_whole"):
        (root / name).symlink_to(root / "imagenet")
    return root


@pytest.mark.parametrize("name", ["digits/softpp_nano", "cifar10/weights", "reproduction/cifar10"])
def test_one_step_of_recipes_of_small_images(name: str, folders: Path, step: Step) -> None:
    step(folders, [name], [SHALLOW])


VIT = ["--model.backbone=vit_tiny_patch16_224", "--model.options.depth=1",
       "--model.options.dynamic_img_size=true", "--model.tie_qk=true"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("changes", [[SHALLOW], VIT], ids=["pyramid", "vit"])
def test_one_step_of_the_recipe_of_imagenet(changes: list[str], folders: Path, step: Step) -> None:
    step(folders, ["imagenet/paper"], [*changes, "--data.size=64"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "changes"),
    [
        ("coco", "coco_tiny", []),
        ("coco", "coco_tiny", ["--model.detector=retinanet"]),
        ("bccd", "bccd", []),
        ("digit_scenes", "", []),
    ],
    ids=["mask_rcnn", "retinanet", "bccd", "digit_scenes"],
)
def test_one_step_and_one_evaluation_of_recipes_of_detection(
    name: str, data: str, changes: list[str], step: Step
) -> None:
    """At reduced size and depth, two images in training."""
    real = Path(os.environ.get("SOFTMAXFREE_DATA", "")) / data
    if not real.is_dir():
        pytest.skip(f"{data} is not in $SOFTMAXFREE_DATA")
    small = [
        "--data.sizes=[96]",
        "--model.size=96",
        "--model.max_size=160",
        "--model.width=64",
        SHALLOW,
    ]
    step(None, [f"detection/{name}"], [f"--data.root={real}", *small, *changes])


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of label maps by the recipes' names, of two images for each split."""
    root = tmp_path_factory.mktemp("labelled")
    rng = np.random.default_rng(0)

    def write(image: str, label: str, classes: int) -> None:
        for name, shape, highest in ((image, (96, 128, 3), 256), (label, (96, 128), classes)):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, highest, shape, dtype=np.uint8)).save(root / name)

    for number in range(2):
        for split in ("training", "validation"):
            name = f"{split}/{number}"
            write(f"ade20k/images/{name}.jpg", f"ade20k/annotations/{name}.png", 151)
        for split in ("train", "val"):
            name = f"{split}/city/city_{number:06}_000019"
            write(f"cityscapes/leftImg8bit/{name}_leftImg8bit.png",
                  f"cityscapes/gtFine/{name}_gtFine_labelIds.png", 34)  # fmt: skip
            write(f"camvid/{split}/{number}.png", f"camvid/{split}annot/{number}.png", 12)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ade20k", []),
        ("cityscapes", ["--model.window=64", "--model.step=48"]),
        ("cityscapes", ["--model.window=64", "--model.step=48", "--model.decoder=setr_pup"]),
        ("camvid", []),
        ("digit_scenes", []),
    ],
    ids=["ade20k", "cityscapes", "setr_pup", "camvid", "digit_scenes"],
)
def test_one_step_and_one_evaluation_of_recipes_of_segmentation(
    name: str, changes: list[str], labelled: Path, step: Step
) -> None:
    """At reduced size and depth."""
    if "--model.decoder=setr_pup" in changes:
        changes = [*changes, "--model.backbone=softpp_vit_small", "--model.options.depth=1"]
    else:
        changes = [*changes, SHALLOW]
    small = ["--data.crop=64", "--model.width=64", "--data.train_size=96", "--data.eval_size=96"]
    step(labelled, [f"segmentation/{name}"], [*small, *changes])


@pytest.fixture(scope="session")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of sequences by the recipes' names, of a few samples."""
    root = tmp_path_factory.mktemp("sequences")
    write_reviews(root / "imdb")
    write_papers(root / "aan")
    for split in ("train", "test"):
        for name in "abcdefghij":
            path = root / "cifar10" / split / name / "image.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (32, 32), "red").save(path)
    write_contours(root / "pathfinder/lra_release/pathfinder32/curv_contour_length_14")
    return root


@pytest.mark.parametrize("recipe", LRA, ids=lambda path: path.stem)
def test_one_step_and_one_evaluation_of_every_recipe_of_the_long_range_arena(
    recipe: Path, sequences: Path, step: Step
) -> None:
    """With the short overlay where there is one."""
    names = [f"lra/{recipe.stem}", f"lra/short_{recipe.stem}"]
    few = ["--data.val_samples=1", "--data.eval_batch_size=2"]
    step(sequences, [name for name in names if (RECIPES / f"{name}.yaml").exists()], few)


def test_the_cifar_recipe_reads_the_real_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Path(os.environ.get("SOFTMAXFREE_DATA", "")) / "cifar10"
    if not real.is_dir():
        pytest.skip("CIFAR-10 is not in $SOFTMAXFREE_DATA")
    train = open_source("", str(real), "train")
    assert isinstance(train, Source)
    assert len(train) == 10_000
    assert train.load(123)[0].size == (32, 32)
    monkeypatch.chdir(tmp_path)
    recipe = str(RECIPES / "cifar10/softpp_nano.yaml")
    few = ["--data.batch_size=16", "--data.eval_batch_size=16", "--trainer.fast_dev_run=2"]
    run("fit", ["--config", recipe, *few, "--out", "run"])
    assert "went through" in capsys.readouterr().out
    assert not Path("run").exists()
