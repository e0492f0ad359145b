"""Every recipe is loaded, and one step of it is run."""

import os
from pathlib import Path

import pytest
import yaml

from softmaxfree.data.sources import Digits, Source, open_source
from softmaxfree.training.command import TrainingCLI, run

RECIPES = Path(__file__).parents[2] / "recipes"
RUNNABLE = sorted(path for path in RECIPES.rglob("*.yaml") if path.name != "fsdp.yaml")
PAPER = {
    "softpp_tiny": 80.9, "softpp_small": 82.6, "softpp_medium": 83.7, "softpp_large": 84.1,
    "soft_tiny": 80.9, "soft_small": 82.5, "soft_medium": 83.2, "soft_large": 83.6,
}  # fmt: skip


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets by the recipes' names and with their numbers of classes; one image many times."""
    root = tmp_path_factory.mktemp("data")
    image, _ = Digits("train").load(0)
    image.resize((64, 64)).save(root / "image.png")
    for name, classes, splits in (("imagenet", 1000, ("train", "val")),
                                  ("cifar10", 10, ("train", "test"))):  # fmt: skip
        for split in splits:
            for number in range(classes):
                folder = root / name / split / f"c{number:04}"
                folder.mkdir(parents=True)
                os.link(root / "image.png", folder / "image.png")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RUNNABLE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_one_step_of_every_recipe(
    recipe: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("SOFTMAXFREE_DATA", str(data))
    monkeypatch.chdir(tmp_path)
    here = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto",
            "--trainer.precision=32", "--data.batch_size=2", "--data.num_workers=0",
            "--data.size=64", "--trainer.fast_dev_run=1"]  # fmt: skip
    run("fit", ["--config", str(recipe), *here, "--out", "run"])
    assert "one step of training and validation went through" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RUNNABLE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_says_command_hardware_duration_and_score(recipe: Path) -> None:
    lines = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    header = "\n".join(lines)
    for word in ("command:", "hardware:", "duration:", "score:"):
        assert word in header
    assert max(len(line) for line in recipe.read_text().splitlines()) <= 100
    if recipe.stem in PAPER and recipe.parent.name == "imagenet":
        assert f"{PAPER[recipe.stem]} % top-1 in the paper" in header
    if recipe.parent.name == "imagenet":
        assert f"recipes/imagenet/{recipe.name}" in header


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


def test_sharded_training_is_a_configuration(tmp_path: Path) -> None:
    """It needs GPUs to run; here it is read, and its strategy built."""
    from lightning.pytorch.strategies import FSDPStrategy

    cli = Parsed.__new__(Parsed)
    recipes = [str(RECIPES / "imagenet/softpp_large.yaml"), str(RECIPES / "fsdp.yaml")]
    with pytest.raises(StopIteration):
        cli.__init__(  # type: ignore[misc]
            "fit", [word for path in recipes for word in ("--config", path)]
            + ["--out", str(tmp_path / "run")],
        )  # fmt: skip
    config = cli.config.fit
    assert config.model.init_args.ema is None
    assert config.model.init_args.backbone == "softpp_large"
    strategy = cli.parser.instantiate_classes(cli.config).fit.trainer.strategy
    assert isinstance(strategy, FSDPStrategy)
    assert strategy.sharding_strategy.name == "FULL_SHARD"
