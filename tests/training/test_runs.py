"""Runs from the command line, in this process: what they write, print and refuse."""

import csv
import json
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from PIL import Image

from softmaxfree.data import ImageData
from softmaxfree.errors import DivergedError, UserError
from softmaxfree.layers.registry import ATTENTIONS
from softmaxfree.models.weights import find_weights
from softmaxfree.tasks.predict import Classifier
from softmaxfree.tasks.predict import run as predict
from softmaxfree.training.checkpoint import SIGNALS
from softmaxfree.training.command import run
from softmaxfree.training.folder import folder_of_run
from softmaxfree.training.log import read_metrics
from softmaxfree.training.runs import describe, report

from ..data.folders import write_digits
from ..test_cli import softmaxfree as in_this_process
from .conftest import Fit, equal, weights


def test_a_run_leaves_everything_that_is_needed(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit("--trainer.max_epochs=2")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "last.ckpt", "best.ckpt", "config.yaml", "run.json", "metrics.jsonl", "run.png",
        "example.png", "previous.ckpt", ".lock",
    }  # fmt: skip
    with Image.open(folder / "run.png") as curves:
        assert curves.width > 500
    told = json.loads((folder / "run.json").read_text())
    assert told["versions"]["lightning"]
    assert told["hardware"]["cores"]
    assert list(told["scores"]["accuracy"]) == ["16", "24", "32"]
    assert 0 <= told["data_wait"] < 1
    assert 0 < 6 * told["seconds_per_step"] < told["seconds"]
    assert told["peak_bytes"] > 1e8
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["init_args"]["mixup"] == 0.8
    assert config["trainer"]["max_epochs"] == 2
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [step for step, _ in metrics["train/loss_step"]] == list(range(6))
    assert len(metrics["train/data_wait"]) == 2
    assert [step for step, _ in metrics["val/accuracy"]] == [2, 5, 6]  # each epoch, and at the end

    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].startswith("training softpp_nano from scratch (0.0 M parameters) on digits")
    accuracy = f"held-out accuracy: {told['scores']['accuracy']['16'] * 100:.2f} %"
    assert lines.index(accuracy) == lines.index("try next") - 1
    assert "softmaxfree predict run/example.png --checkpoint run/last.ckpt" in printed
    for size in (16, 24, 32):
        assert f"at {size} x {size} pixels" in printed
    assert "of the time of a step" in printed

    predict([folder / "example.png"], folder / "last.ckpt")
    assert "%" in capsys.readouterr().out
    predict([folder / "example.png"], folder / "last.ckpt", out=tmp_path / "found.jsonl")
    found = json.loads((tmp_path / "found.jsonl").read_text())
    assert found["image"] == str(folder / "example.png")
    classes = found["found"]
    assert len(classes) == 5
    assert [entry["probability"] for entry in classes] == sorted(
        (entry["probability"] for entry in classes), reverse=True
    )
    assert {entry["class"] for entry in classes} <= {str(digit) for digit in range(10)}


def test_the_commands_to_try_next_work_when_pasted(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(tmp_path / "my numbers", train=20, val=10)
    fit("--data.name=", f"--data.root={tmp_path / 'my numbers'}", "--data.val_split=val",
        "--data.batch_size=16", out="my run")  # fmt: skip
    lines = capsys.readouterr().out.split("try next\n")[1].splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("  ")]
    assert [words[words.index("softmaxfree") + 1] for words in commands] == [
        "predict", "figures", "validate"
    ]  # fmt: skip
    for words in commands:
        done = in_this_process(*words[words.index("softmaxfree") + 1 :])
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_prediction_uses_the_averaged_weights_and_the_runs_preparation(fit: Fit) -> None:
    folder = fit()
    predictor = Classifier(find_weights(folder))
    averaged = weights(folder / "last.ckpt", "state_dict")
    assert not equal(averaged, weights(folder / "last.ckpt"))
    own = {f"model.{name}": tensor for name, tensor in predictor.model.state_dict().items()}
    assert equal(own, averaged)
    pixels = predictor.tensor(Image.open(folder / "example.png").convert("RGB"))
    assert pixels.shape == (1, 3, 16, 16)
    assert predictor.seen(pixels).shape == (16, 16, 3)
    assert predictor.probabilities(pixels).sum() == pytest.approx(1, abs=1e-5)


def test_validation_takes_its_configuration_from_the_checkpoint(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit("--trainer.limit_val_batches=3")
    told = json.loads((folder / "run.json").read_text())["scores"]["accuracy"]
    capsys.readouterr()
    run("validate", ["--checkpoint", str(folder / "last.ckpt"), "--data.eval_sizes", "[16,24,32]"])
    printed = capsys.readouterr().out
    for size, accuracy in told.items():
        name = "val/accuracy" if size == "16" else f"val/accuracy@{size}"
        line = next(line for line in printed.splitlines() if f"{name} " in line)
        assert line.endswith(f" {accuracy * 100:.2f} %")
    run("test", ["--checkpoint", str(folder / "best.ckpt")])
    assert "test/accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_going_on_from_the_best_checkpoint_is_the_same_run(fit: Fit) -> None:
    """best.ckpt is written in the middle of validation."""
    whole = fit("--trainer.max_epochs=2")
    first = fit(out="first")
    steps = torch.load(first / "best.ckpt", weights_only=True)["global_step"]
    assert steps == 3
    again = fit("--trainer.max_epochs=2", "--checkpoint", str(first / "best.ckpt"), out="again")
    ends = [torch.load(run / "last.ckpt", weights_only=True) for run in (whole, again)]
    assert ends[0]["global_step"] == ends[1]["global_step"] == 6
    # Only the schedule's length differs, which the first run was told to be 3.
    assert ends[0]["epoch"] == ends[1]["epoch"]


def test_a_run_starts_from_another_and_trains_a_part(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fit(out="first")
    capsys.readouterr()
    second = fit(
        "--model.init_checkpoint=first", "--model.freeze=[stages.0*]",
        "--model.layer_decay=0.8", out="second",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "tensors taken" in printed
    assert "training softpp_nano from first (" in printed
    assert "  first " in report([describe(second)], "simple")
    before, after = weights(first / "last.ckpt", "state_dict"), weights(second / "last.ckpt")
    frozen = [name for name in before if name.startswith("model.stages.0")]
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not torch.equal(before["model.head.weight"], after["model.head.weight"])
    shutil.rmtree(first)  # no longer needed
    run("validate", ["--checkpoint", "second/last.ckpt"])
    told = json.loads((second / "run.json").read_text())["scores"]["accuracy"]["16"]
    assert f"{told * 100:.2f} %" in capsys.readouterr().out


OWN = """
from softmaxfree import MultiHeadAttention, register_attention

@register_attention("mine")
class MyAttention(MultiHeadAttention):
    def attend(self, q, k, v, layout):
        return v.mean(-2, keepdim=True) + q
"""


@pytest.mark.slow
def test_an_attention_of_ones_own_from_fit_to_export(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOFTMAXFREE_RUN", raising=False)
    (tmp_path / "mine.py").write_text(OWN)

    def command(*words: str | Path) -> str:
        """As in a process that has not imported the module."""
        sys.modules.pop("mine", None)
        ATTENTIONS.pop("mine", None)
        done = in_this_process(*map(str, words))
        assert done.returncode == 0, done.stderr
        return done.stdout

    few = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--data.num_workers=0")
    own = ("--modules", "mine")
    printed = command(
        "fit", "--config", small, "--out", "run", *few, *own, "--model.attention", "mine"
    )
    line = next(line for line in printed.splitlines() if "softmaxfree predict " in line)
    words = shlex.split(line.partition(" softmaxfree ")[2])
    assert words[-2:] == ["--modules", "mine"]
    assert "%" in command(*words)
    assert "val/accuracy" in command("validate", "--checkpoint", "run/last.ckpt", *own)
    checked = command("export", "run", "model.pt2", "--traced_size=32", *own)
    assert [size in checked for size in ("  32 x 32:", "  64 x 32:")] == [True, True]
    ATTENTIONS.pop("mine")
    done = in_this_process("export", "run", "again.pt2")
    assert done.returncode == 1
    assert "unknown attention 'mine'" in done.stderr
    with pytest.raises(ValueError, match=r"because a file names them: give --modules mine"):
        run("test", ["--checkpoint", str(tmp_path / "run/last.ckpt")])


def test_weights_from_elsewhere_are_scored(
    fit: Fit, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the authors': validate with init_checkpoint, and no run."""
    told = json.loads((fit() / "run.json").read_text())["scores"]["accuracy"]["16"]
    capsys.readouterr()
    run("validate", ["--config", str(small), "--model.init_checkpoint=run/last.ckpt"])
    assert f"{told * 100:.2f} %" in capsys.readouterr().out
    with pytest.raises(ValueError, match="validate would score untrained weights"):
        run("validate", ["--config", str(small)])


def test_packaged_weights_are_scored_by_name(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prepared as they were trained, also if the configuration is another model's."""
    folder = write_digits(tmp_path / "images", train=10)
    for given in (
        ["--data.root", str(folder), "--data.val_split=val"],
        ["--config", str(small)],
    ):
        run("validate", ["--checkpoint=digits-softpp", *given, "--data.num_workers=0"])
        told = capsys.readouterr().out
        assert "digits-softpp: 141 of the model's 141 tensors taken\n" in told
        accuracy = float(re.findall(r"val/accuracy +([\d.]+) %", told)[0])
        assert accuracy >= 95
    with pytest.raises(UserError, match=r"which images to score: give --data.root FOLDER"):
        run("validate", ["--checkpoint", "digits-softpp"])
    with pytest.raises(UserError, match=r"start a new run .* --model.init_checkpoint digits"):
        run("fit", ["--checkpoint", "digits-softpp"])


def test_a_run_gives_signals_back_and_is_not_written_over(fit: Fit) -> None:
    """A handler of Lightning's that stays would keep all of the run in memory."""
    before = [signal.getsignal(number) for number in SIGNALS]
    fit()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(ValueError, match="run holds a run already: give --checkpoint last"):
        fit()


def test_folders_are_numbered_when_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = Namespace(
        checkpoint=None,
        out=None,
        model=Namespace(init_args=Namespace(backbone="softpp_nano")),
        data=Namespace(init_args=Namespace(name="torch/cifar10")),
    )
    monkeypatch.setenv("SOFTMAXFREE_RUN", "")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for expected in ("runs/softpp_nano-cifar10", "runs/softpp_nano-cifar10-2"):
        folder = folder_of_run(given)
        assert str(folder) == expected
        folder.mkdir(parents=True)
    monkeypatch.setenv("LOCAL_RANK", "1")  # a process that Lightning started for this run
    assert folder_of_run(given) == folder


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    fit: Fit, tmp_path: Path
) -> None:
    write_digits(tmp_path / "numbers", train=40, val=20)
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf) at step [12]") as caught:
        fit(
            "--data.name=", "--data.root=numbers", "--data.val_split=val", "--data.batch_size=8",
            "--model.optimizer=sgd", "--model.lr=1e30", "--model.warmup_epochs=0",
            "--save_every=1", "--trainer.gradient_clip_val=null",
        )  # fmt: skip
    names = str(caught.value).partition("the batch: ")[2].split(", ")
    assert len(names) == 8
    assert all(Path(name).is_file() for name in names)
    saved = tmp_path / "run" / "last.ckpt"
    if saved.exists():  # after a step whose weights were still finite
        assert all(tensor.isfinite().all() for tensor in weights(saved).values())


def test_weights_that_are_not_finite_are_never_saved(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from softmaxfree.tasks import Classification

    def poison(task: Classification, *_: Any) -> None:
        if task.trainer.global_step == 3:
            next(task.model.parameters()).data.fill_(float("nan"))

    monkeypatch.setattr(Classification, "on_train_batch_end", poison)
    with pytest.raises(DivergedError, match=r"no longer finite after step 3"):
        fit("--save_every=1")
    assert all(tensor.isfinite().all() for tensor in weights(Path("run/last.ckpt")).values())


def test_a_bug_in_a_run_leaves_its_traceback_in_the_folder(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from softmaxfree.tasks import Classification

    def broken(task: Classification, *_: object) -> None:
        raise ValueError("a bug of ours, an hour into training")

    monkeypatch.setattr(Classification, "on_train_batch_end", broken)
    with pytest.raises(ValueError, match="an hour into training"):
        fit()
    left = Path("run/traceback.txt").read_text()
    assert left.startswith("Traceback (most recent call last)")
    assert "ValueError: a bug of ours, an hour into training" in left


def test_a_mistake_in_a_run_leaves_no_traceback(fit: Fit) -> None:
    with pytest.raises(UserError, match="--save_every must be at least 1, got 0"):
        fit("--save_every=0")
    assert not Path("run/traceback.txt").exists()


def test_broken_images_are_reported_at_the_end(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_digits(tmp_path / "numbers", train=40, val=20)
    victim = next((root / "train" / "3").iterdir())
    victim.write_bytes(victim.read_bytes()[:60])
    fit(
        "--data.name=", "--data.root=numbers", "--data.val_split=val", "--data.batch_size=8",
        "--trainer.limit_train_batches=1.0",
    )  # fmt: skip
    assert "broken images  1, skipped" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/run.json").read_text())["broken_images"] == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model.num_classes=7"], "the data has 10 classes in its train split"),
        (["--data.batch_size=5000"], "has 1437 samples, fewer than one batch of 5000"),
        (["--data.batch_size=9"], "need an even number of images"),
        (["--trainer.accumulate_grad_batches=3"], "give --data.batch_size a multiple of 3"),
        (["--model.backbone=softpp_nan"], "no model 'softpp_nan'; did you mean softpp_nano"),
        (["--model.freeze=[stage.0]"], "nothing of the model is called 'stage.0'"),
        (["--model.ema=1.5"], "ema must be at least 0 and below 1"),
        (["--data.val_split=dev"], "no split 'dev'"),
        (["--checkpoint=none.ckpt"], "there is no checkpoint none.ckpt"),
        (["--trainer.default_root_dir=here"], "has no effect here; give the run's folder by --out"),
        (["--save_every=0"], "--save_every must be at least 1"),
        (["--data.name=", "--data.root=nowhere"], "nowhere"),
        (["--trainer.accelerator=abacus"], "there is no accelerator 'abacus': give --trainer.acc"),
        (["--model.warmup_epochs=-3"], "--model.warmup_epochs must be at least 0, got -3"),
        (["--model.warmup_epochs=0", "--model.warmup_steps=-3"], "warmup_steps must be at least 0"),
        (["--model.smoothing=3"], "smoothing must be at least 0 and below 1, got 3"),
        (["--model.optimizer_options.foo=1"], "optimizer adamw has no option 'foo'"),
        (["--model.options.toknes=49"], "softpp_nano has no option 'toknes'"),
        (["--model.options.num_classes=3"], "num_classes has an argument of its own: leave it out"),
        (["--lr=1"], r"there is no option --lr; did you mean --model\.lr\?"),
        (["--model.learning_rate=1"], r"option --model\.learning_rate; did you mean --model\.lr\?"),
        (["--trainer.max_epoch=1"], r"there is no option .*; did you mean --trainer\.max_epochs"),
        (["--model.lr=fast"], r"^--model\.lr must be a number, got fast$"),
        (["--model.schedule=cosin"], "must be one of cosine, step, poly, one_cycle, got cosin"),
        (["--model.options={a:1}"], "must be a mapping such as {name: value}, got {a:1}"),
        (["--data=FooData"], "^--data has no class 'FooData'; --help lists them$"),
        (["--trainer.logger=CSVLogger"], r"^--trainer\.logger\.save_dir must be given"),
        (["--config=none.yaml"], r"there is no file .*none\.yaml"),
        (["words"], "^'words' is not expected here"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_stops_at_once_with_one_sentence(
    words: list[str], sentence: str, fit: Fit
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        fit(*words)
    assert "\n" not in str(caught.value)
    assert not Path("run").exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_so(fit: Fit) -> None:
    with pytest.raises(UserError, match=r"torch finds no GPU; use --trainer.accelerator cpu"):
        fit("--trainer.accelerator=gpu")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: {max_epochs: [1\nfoo: :", r"own\.yaml is not YAML; look .* in line 2: \w+"),
        ("modell: 3", r"^there is no option --modell in .*own\.yaml; did you mean --model"),
        (
            "trainer: {max_epochs: few}",
            r"max_epochs must be a whole number, got few in .*own\.yaml",
        ),
        (
            "model: {class_path: softmaxfree.tasks.Classification, init_args: {lrr: 1}}",
            r"^there is no option --model\.lrr in .*own\.yaml; did you mean --model\.lr\?",
        ),
    ],
)
def test_a_mistake_in_a_configuration_is_one_sentence(
    text: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError, match=sentence) as caught:
        run("fit", ["--config", str(tmp_path / "own.yaml")])
    assert "\n" not in str(caught.value)


def test_lightnings_loggers_stand_beside_ours(fit: Fit, tmp_path: Path) -> None:
    loggers = [
        {"class_path": f"{name}Logger", "init_args": {"save_dir": "logs", "name": name}}
        for name in ("CSV", "TensorBoard")
    ]
    (tmp_path / "loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    folder = fit("--config=loggers.yaml")
    assert json.loads((folder / "run.json").read_text())["scores"]
    assert len(read_metrics(folder / "metrics.jsonl")["train/loss_step"]) == 3
    with open("logs/CSV/version_0/metrics.csv") as file:
        logged = [row["train/loss_step"] for row in csv.DictReader(file)]
    assert len([loss for loss in logged if loss]) == 3
    assert list(Path("logs/TensorBoard/version_0").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_training_ends_with_its_status_and_leaves_nothing(
    number: signal.Signals, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ImageData, "setup", lambda *_, **__: signal.raise_signal(number))
    # A shell's background jobs, of which the tests may be one, begin with SIGINT ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before = [signal.getsignal(number) for number in SIGNALS]
        done = in_this_process("fit", "--config", str(small), "--out", "runs/run")
        assert [signal.getsignal(number) for number in SIGNALS] == before
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert done.returncode == 128 + number
    assert not Path("runs").exists()


def test_the_command_line_refuses_what_it_does_not_know(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = in_this_process("fit", "--config", str(small), "--model.learning_rate", "1")
    assert done.returncode == 2
    assert "learning_rate" in done.stderr
    assert "Traceback" not in done.stderr
    done = in_this_process("validate")
    assert done.returncode == 1
    assert done.stderr == (
        "softmaxfree: error: validate needs something to score: "
        "give --checkpoint FILE, or --config FILE\n"
    )
    done = in_this_process("fit", "--help_all")
    assert done.returncode == 0
    assert "--trainer.detect_anomaly" in done.stdout
    assert "--weights_only" not in done.stdout  # which is not for the user to turn off
    assert in_this_process("fit", "--print_config").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
