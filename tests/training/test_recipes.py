"""Every recipe is loaded, and one step of it is run."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from softmaxfree.data.sources import Digits, Source, open_source
from softmaxfree.lab import paper
from softmaxfree.training.command import TrainingCLI, run

from ..data.test_sequences import write_contours, write_papers, write_reviews

RECIPES = Path(__file__).parents[2] / "recipes"
WHOLE = sorted(path for path in RECIPES.rglob("*.yaml") if "seed_everything" in path.read_text())
"""The others change one of these, given after it."""
SEGMENTATION = [path for path in WHOLE if path.parent.name == "segmentation"]
DETECTION = [path for path in WHOLE if path.parent.name == "detection"]
LRA = [path for path in WHOLE if path.parent.name == "lra"]
IMAGES = [path for path in WHOLE if path not in DETECTION + SEGMENTATION + LRA]
COCO = [path for path in DETECTION if "softpp" in path.stem]
PAPER_MIOU = {
    f"{data.lower()}_{backbone}": row.miou
    for data, printed in paper.SEGMENTATION.items()
    for backbone, row in printed.rows.items()
    if row.miou is not None
}
PAPER_AP = {
    f"{detector}_{backbone}": f"{row.ap} AP ({row.ap50} AP50, {row.ap75} AP75)"
    if row.mask_ap is None
    else f"{row.ap} box AP, {row.mask_ap} mask AP"
    for detector, rows in paper.DETECTION.items()
    for backbone, row in rows.items()
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets by the recipes' names and with their numbers of classes; one image many times."""
    root = tmp_path_factory.mktemp("data")
    image, _ = Digits("train").load(0)
    image.resize((64, 64)).save(root / "image.png")
    for name, classes, splits in (("imagenet", 1000, ("train", "val")),
                                  ("cifar10", 10, ("train", "test")),
                                  ("cifar10_whole", 10, ("train", "test"))):  # fmt: skip
        for split in splits:
            for number in range(classes):
                folder = root / name / split / f"c{number:04}"
                folder.mkdir(parents=True)
                os.link(root / "image.png", folder / "image.png")
    return root


HERE = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto",
        "--trainer.precision=32", "--data.batch_size=2", "--data.num_workers=0",
        "--trainer.fast_dev_run=1"]  # fmt: skip

SHALLOW = "--model.options.depths=[1,1,1,1]"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", IMAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_one_step_of_every_recipe(
    recipe: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("SOFTMAXFREE_DATA", str(data))
    monkeypatch.chdir(tmp_path)
    small = [] if "vit" in recipe.stem or "swin" in recipe.stem else [SHALLOW]
    run("fit", ["--config", str(recipe), *HERE, *small, "--data.size=64", "--out", "run"])
    assert "one step of training and validation went through" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [path for path in DETECTION if path not in COCO or path.stem.endswith("_tiny")],
    ids=lambda path: path.stem,
)
def test_one_step_and_one_evaluation_of_recipes_of_detection(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """At reduced size and depth, two images in training; larger ones differ in the backbone."""
    data = {"bccd": "bccd", "digit_scenes": ""}.get(recipe.stem, "coco_tiny")
    real = Path(os.environ.get("SOFTMAXFREE_DATA", "")) / data
    if not real.is_dir():
        pytest.skip(f"{data} is not in $SOFTMAXFREE_DATA")
    monkeypatch.chdir(tmp_path)
    small = [f"--data.root={real}", "--data.sizes=[96]", "--model.size=96", "--model.max_size=160",
             SHALLOW]  # fmt: skip
    run("fit", ["--config", str(recipe), *HERE, *small, "--out", "run"])
    assert "one step of training and validation went through" in capsys.readouterr().out


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
@pytest.mark.parametrize("recipe", SEGMENTATION, ids=lambda path: path.stem)
def test_one_step_and_one_evaluation_of_every_recipe_of_segmentation(
    recipe: Path, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """At reduced size and depth."""
    monkeypatch.setenv("SOFTMAXFREE_DATA", str(labelled))
    monkeypatch.chdir(tmp_path)
    small = ["--data.crop=64", "--model.width=64", "--data.train_size=96", "--data.eval_size=96"]
    if "vit" not in recipe.stem:
        small += [SHALLOW]
    if recipe.stem.startswith("cityscapes"):
        small += ["--model.window=64", "--model.step=48"]
    run("fit", ["--config", str(recipe), *HERE, *small, "--out", "run"])
    assert "one step of training and validation went through" in capsys.readouterr().out


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
    recipe: Path, sequences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("SOFTMAXFREE_DATA", str(sequences))
    monkeypatch.chdir(tmp_path)
    short = recipe.with_name(f"short_{recipe.name}")
    configs = [recipe, short] if short.exists() else [recipe]
    words = [f"--config={path}" for path in configs]
    few = ["--data.val_samples=1", "--data.eval_batch_size=2", "--out=run"]
    run("fit", [*words, *HERE, *few])
    assert "one step of training and validation went through" in capsys.readouterr().out


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


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_says_command_hardware_duration_and_score(recipe: Path) -> None:
    lines = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    header = "\n".join(lines)
    for word in ("command:", "hardware:", "duration:", "score:"):
        assert word in header
    assert max(len(line) for line in recipe.read_text().splitlines()) <= 100
    if recipe.stem in paper.BACKBONES and recipe.parent.name == "imagenet":
        assert f"{paper.BACKBONES[recipe.stem].top1} % top-1 in the paper" in header
    if recipe.parent.name in ("imagenet", "detection", "segmentation", "lra"):
        assert f"recipes/{recipe.parent.name}/{recipe.name}" in header
    if recipe.stem in PAPER_MIOU:
        assert f"{PAPER_MIOU[recipe.stem]} mIoU in the paper" in header
    if recipe in LRA and recipe.stem in paper.LRA["soft"]:
        assert f"{paper.LRA['soft'][recipe.stem]:.2f} % in the paper (SOFT)" in header
    if recipe in COCO:
        assert f"{PAPER_AP[recipe.stem]} in the paper" in header


def test_recipes_of_the_paper_differ_only_in_the_model() -> None:
    recipes = [yaml.safe_load(path.read_text()) for path in (RECIPES / "imagenet").glob("*.yaml")]
    assert len(recipes) == 23
    first = recipes[0]
    own = {"backbone", "attention", "tie_qk", "drop_path", "options"}
    for recipe in recipes:
        assert recipe["trainer"] == first["trainer"]
        assert recipe["data"] == first["data"]
        arguments, others = recipe["model"]["init_args"], first["model"]["init_args"]
        for name in (arguments.keys() | others.keys()) - own:
            assert arguments.get(name) == others.get(name), name


def test_detection_recipes_differ_only_in_detector_and_backbone() -> None:
    recipes = [yaml.safe_load(path.read_text()) for path in COCO]
    assert len(recipes) == 8
    for recipe in recipes:
        arguments = recipe["model"]["init_args"]
        assert {name: arguments[name] for name in ("optimizer", "lr", "weight_decay")} == {
            "optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.01
        }  # fmt: skip
        assert recipe["data"]["init_args"]["batch_size"] == 16
        for name in ("detector", "backbone", "drop_path"):
            arguments.pop(name)
        assert recipe == recipes[0]


def test_segmentation_recipes_are_the_papers() -> None:
    for path in SEGMENTATION:
        if path.stem not in PAPER_MIOU:
            continue
        recipe = yaml.safe_load(path.read_text())
        steps, crop = (160_000, 512) if path.stem.startswith("ade20k") else (40_000, 768)
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
    tmp_path: Path,
) -> None:  # fmt: skip
    paths = [COCO[0], RECIPES / f"detection/{change}.yaml"]
    config = parsed(paths, tmp_path)
    before = parsed(paths[:1], tmp_path)
    changes = ((("trainer",), trainer), (("model", "init_args"), model),
               (("data", "init_args"), data))  # fmt: skip
    for place, changed in changes:
        now, then = (config[".".join(place)], before[".".join(place)])
        assert {name: now[name] for name in changed} == changed
        others = [name for name in vars(now) if name not in changed]
        assert all(now[name] == then[name] for name in others)


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
    run("fit", ["--config", recipe, "--trainer.fast_dev_run=2", "--out", "run"])
    assert "went through" in capsys.readouterr().out


class Parsed(TrainingCLI):
    """Stops when the configuration is read and checked."""

    def instantiate_classes(self) -> None:
        raise StopIteration


def parse(recipes: list[Path], tmp_path: Path) -> TrainingCLI:
    cli = Parsed.__new__(Parsed)
    with pytest.raises(StopIteration):
        cli.__init__(  # type: ignore[misc]
            "fit", [word for path in recipes for word in ("--config", str(path))]
            + ["--out", str(tmp_path / "run")],
        )  # fmt: skip
    return cli


def parsed(recipes: list[Path], tmp_path: Path) -> Any:
    return parse(recipes, tmp_path).config


def test_sharded_training_is_a_configuration(tmp_path: Path) -> None:
    """It needs GPUs to run; here it is read, and its strategy built."""
    from lightning.pytorch.strategies import FSDPStrategy

    cli = parse([RECIPES / "imagenet/softpp_large.yaml", RECIPES / "fsdp.yaml"], tmp_path)
    config = cli.config
    assert config.model.init_args.ema is None
    assert config.model.init_args.backbone == "softpp_large"
    strategy = cli.parser.instantiate(cli.config).trainer.strategy
    assert isinstance(strategy, FSDPStrategy)
    assert strategy.sharding_strategy.name == "FULL_SHARD"
