"""A folder of images, from the page docs/your-images.md: as printed, and with mistakes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import Namespace
from PIL import Image

from softmaxfree.errors import UserError
from softmaxfree.training.arguments import complete, with_classes, with_configuration
from softmaxfree.training.command import run
from softmaxfree.words import with_lists

from .conftest import environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your-images.md").read_text()
WRITE, USE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FIT, VALIDATE, SIZES, *OTHERS = (
    shlex.split(line) for line in re.findall(r"^    softmaxfree (.*)$", PAGE, re.MULTILINE)
)
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--data.num_workers=0",
         "--trainer.limit_val_batches=1", "--trainer.accelerator=cpu", "--data.batch_size=16",
         "--trainer.enable_progress_bar=false"]  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the page's first commands were run."""
    folder = tmp_path_factory.mktemp("page")
    os.environ.pop("SOFTMAXFREE_RUN", None)
    with chdir(folder):
        exec(WRITE, {})
        run("fit", [*FIT[1:], *SHORT])
    return folder


@pytest.fixture
def inside(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(here)
    return here


def test_classes_and_preparation_are_found(inside: Path) -> None:
    config = yaml.safe_load(Path("runs/numbers/config.yaml").read_text())
    data = config["data"]["init_args"]
    assert config["model"]["init_args"]["num_classes"] == 10
    assert (data["name"], data["root"], data["size"], data["crop_pct"]) == ("", "numbers", 32, 1.0)
    assert data["mean"] == [0.4914, 0.4822, 0.4465]
    assert data["std"] == [0.247, 0.2435, 0.2616]


def test_what_was_found_is_printed_before_training(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("fit", [*FIT[1:-1], "again", *SHORT, "--trainer.fast_dev_run=1"])
    output, errors = capsys.readouterr()
    assert "Cosine" not in errors  # timm's advice on a schedule of one step
    printed = [line for line in output.splitlines() if line]
    promised = [line.strip() for line in PAGE.splitlines() if line.startswith("    classes ")]
    first = printed.index(promised[0])
    assert "on numbers" in printed[first - 3]
    page = PAGE[PAGE.index("    train  ") :].splitlines()[:4]
    assert printed[first - 2 : first + 2] == [line.strip() for line in page]


def test_few_images_make_a_small_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "few" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (8, 8)).save(tmp_path / "few" / name / f"{number}.webp")
    (tmp_path / "few/nothing").mkdir()
    short = [word for word in SHORT if "batch_size" not in word]
    run("fit", ["--data.root", str(tmp_path / "few"), *short, "--out", str(tmp_path / "run"),
                "--trainer.fast_dev_run=1"])  # fmt: skip
    printed = capsys.readouterr().out
    assert "train          8 images" in printed
    assert "batch          8 images" in printed
    assert f"left out       {tmp_path}/few/nothing/ (no images)" in printed


def test_the_page_s_validation_runs(
    inside: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    run(VALIDATE[0], [*VALIDATE[1:], *SHORT[2:]])
    run(SIZES[0], [*SIZES[1:], *SHORT[2:]])
    assert capsys.readouterr().out.count("val/accuracy ") == 2
    assert not [str(one.message) for one in recwarn if "ckpt_path" in str(one.message)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda root: shutil.rmtree(root / "nine"), r"9 classes .* has 10: give data with the cl"),
        (
            lambda root: (root / "nine").rename(root / "ten"),
            r"10 classes \(eight, .*, but the checkpoint has eight, .*: give data with the classes",
        ),
    ],
    ids=["fewer", "renamed"],
)
def test_data_of_other_classes_is_refused(change: Any, sentence: str, inside: Path) -> None:
    shutil.rmtree("other", ignore_errors=True)
    change(shutil.copytree("numbers", inside / "other"))
    with pytest.raises(UserError, match=f"the data has {sentence}.*--model.init_checkpoint"):
        run("validate", [*VALIDATE[1:], "--data.root=other", *SHORT[2:]])


def test_a_class_without_images_to_validate_with_is_named(tmp_path: Path, here: Path) -> None:
    for split in ("train", "val"):
        for name in ("one", "two", "three")[: 3 if split == "train" else 2]:
            shutil.copytree(here / "numbers" / name, tmp_path / "few" / split / name)
    words = ["--data.root", str(tmp_path / "few"), "--out", str(tmp_path / "run"), *SHORT]
    with pytest.raises(
        UserError, match=r"val split \(.*few/val\) .*: it has no images of three; g"
    ):
        run("fit", words)


def test_what_is_given_wins_over_the_weights() -> None:
    data: dict[str, Any] = {"name": None, "root": None, "size": 48, "mean": None}
    init = {"backbone": "softpp_nano.cifar10", "num_classes": None}
    config = Namespace(
        model=Namespace(class_path="softmaxfree.tasks.Classification", init_args=Namespace(init)),
        data=Namespace(class_path="softmaxfree.data.ImageData", init_args=Namespace(data)),
    )
    complete(config, "fit")
    assert config.data.init_args.size == 48
    assert config.data.init_args.mean == (0.4914, 0.4822, 0.4465)
    assert config.data.init_args.name == "digits"
    assert config.model.init_args.num_classes == 10


def test_recipes_are_found_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(ROOT / "recipes/cifar10/softpp_nano.yaml")
    for name in ("cifar10/softpp_nano", "recipes/cifar10/softpp_nano.yaml", file):
        assert with_configuration("fit", ["--config", name]) == ["--config", file]
        assert with_configuration("fit", [f"--config={name}"]) == [f"--config={file}"]
    with pytest.raises(
        UserError, match=r"no file cifar11/softpp_nano .* one of cifar10/softpp_nano"
    ):
        with_configuration("fit", ["--config", "cifar11/softpp_nano"])
    assert capsys.readouterr().err == ""
    with_configuration("fit", ["--model.backbone", "softpp_nano"])
    assert "no --data.root and no --config: the data is scikit-learn's" in capsys.readouterr().err


def test_a_configuration_needs_no_classes(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(
        "{model: {backbone: softpp_nano, lr: 2e-3}, data: {root: numbers}}"
    )
    with pytest.raises(SystemExit):
        run("fit", ["--config=mine.yaml", "--data.size", "48", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    model, data = config["model"], config["data"]
    assert model["class_path"] == "softmaxfree.tasks.Classification"
    assert (model["init_args"]["backbone"], model["init_args"]["lr"]) == ("softpp_nano", 0.002)
    assert data["class_path"] == "softmaxfree.data.ImageData"
    assert (data["init_args"]["root"], data["init_args"]["size"]) == ("numbers", 48)
    detection = str(ROOT / "recipes/detection/digit_scenes.yaml")
    *_, second = with_classes(["--config", detection, "-c", "mine.yaml"])
    assert yaml.safe_load(second)["model"]["class_path"] == "softmaxfree.tasks.Detection"


def test_lists_need_no_brackets() -> None:
    words = ["--a", "16", "b:c", "--b", "1", "--c", "x", "--d", "[2,3]", "--e=7", "--flag", "--f"]
    joined = ["--a", '[16,"b:c"]', "--b", "1", "--c", "[x]", *words[7:]]
    assert with_lists(words, {"--c", "--d"}) == joined


def test_the_notebook_has_the_page_s_steps() -> None:
    cells = json.loads((ROOT / "docs/your-images.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
    commands = [line[1:] for cell in code for line in cell.splitlines() if line.startswith("!")]
    assert [shlex.split(line)[1:] for line in commands] == [FIT, VALIDATE, SIZES, *OTHERS]
    assert code[0] == WRITE
    assert code[-1].startswith(USE)
    assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.slow
def test_the_whole_page_as_a_user_walks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fresh processes, outside the clone: train, validate, predict, draw, export, use.

    With a block fewer than the weights have: exporting takes as long as all else together.
    """
    monkeypatch.chdir(tmp_path)
    exec(WRITE, {})
    printed = {}
    for words in (FIT, VALIDATE, *OTHERS):
        fewer = [*SHORT, "--model.options.depths", *"1111"]
        short = {"fit": fewer, "validate": SHORT[2:]}.get(words[0], [])
        done = subprocess.run(
            [sys.executable, "-m", "softmaxfree", *words, *short],
            env=environment(), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed[words[0]] = done.stdout
    assert "from softpp_nano.cifar10" in printed["fit"].splitlines()[1]
    assert "val/accuracy" in printed["validate"]
    assert Path("figures/heatmap-0003.png").is_file()
    names: dict[str, Any] = {}
    exec(USE, names)
    (classes,) = re.findall(r"^classes +10: (.*)$", printed["fit"], re.MULTILINE)
    found = classes.split(", ")[names["logits"].argmax()]
    of_image = printed["predict"].partition("0003.png")[2]
    assert min(classes.split(", "), key=lambda name: of_image.find(name) % 10**6) == found
