"""Mistakes that users make, and the sentence that each is answered with."""

import io
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import rand

from softmaxfree import SoftmaxFreeAttention, diagnose, register_attention, replace_attention
from softmaxfree.cli import main
from softmaxfree.models.weights import find_weights

DIGITS = "--checkpoint digits-softpp"

COMMANDS = {
    "nothing": "no command 'nothing'; choose one of fit, validate",
    "fitt": "no command 'fitt'; did you mean fit",
    "figures heatmaps": "no command 'heatmaps'; did you mean heatmap",
    "bench atention": "no command 'atention'; did you mean attention",
    "reproduce nonsense": "no experiment 'nonsense'; choose among .*landmarks",
    "reproduce": "name experiments, or give --all",
    "reproduce landmarks --workers 0": "--workers must be at least 1, got 0",
    "bench attention --contestants [nope]": "unknown contestant 'nope'; choose among soft,",
    "bench attention --threads 0": "--threads must be at least 1, got 0",
    "bench attention --against gone.json": "cannot read gone.json: No such file",
    "bench attention --against red.png": "red.png is not JSON",
    "bench attention --modules [no_such]": "no module no_such.*--modules",
    "figures memory --results empty": "cannot read empty/memory.json: .* write it with",
    "figures resolution --root gone": "no folder gone.*--root",
    "figures resolution --sizes [0]": r"--sizes must be .*1 .*got \[0\]",
    "figures heatmap --place [2,2]": r"--place must be two fractions.*got \[2.0, 2.0\]",
    "figures heatmap --images [gone.png]": "gone.png cannot be read.*no such file",
    "figures newton --images [note.png]": "note.png cannot be read.*does not begin as JPEG, PNG",
    "figures heatmap --images [red.png] --size 0": "--size must be from 1 to 4096 pixels, got 0",
    "explore --port 99999999": "--port must be from 0 to 65535, got 99999999",
}
"""Words of commands and values, by the regular expression that the answer matches."""

PREDICT = {
    f"predict gone.png {DIGITS}": "gone.png cannot be read as an image: there is no such file",
    f"predict note.png {DIGITS}": "note.png cannot be read.*does not begin as JPEG, PNG",
    f"predict half.png {DIGITS}": "half.png cannot be read.*begins as PNG.*truncated",
    f"predict empty {DIGITS}": r"no images in empty.*must end in \.jpg",
    f"predict 'gone/*.png' {DIGITS}": r"no file matches gone/\*.png: check the pattern",
    f"predict red.png {DIGITS} --size 0": "--size must be from 1 to 4096 pixels, got 0",
    f"predict red.png {DIGITS} --top 0": "--top must be at least 1, got 0",
    f"predict red.png {DIGITS} --threshold 0.5": "digits-softpp finds classes.*no --threshold",
    f"predict red.png {DIGITS} --out new": r"no pictures: .*\.jsonl or \.csv, got new",
    f"predict red.png {DIGITS} --out found.json": r"--out .*\.jsonl or \.csv, got found.json",
    f"predict red.png {DIGITS} --out gone/found.csv": "no folder gone to write to: create it",
    "predict red.png --checkpoint gone.ckpt": "no checkpoint gone.ckpt",
    "predict red.png --checkpoint half.ckpt": "half.ckpt cannot be read as a checkpoint",
    "predict red.png --checkpoint note.png": "note.png cannot be read as weights",
    "predict red.png --checkpoint empty": "empty holds no weights.*last.ckpt",
    "predict red.png --checkpoint softpp_nano": "without trained weights.*nano.cifar10",
    "predict red.png --checkpoint softpp_nano.cifar": "choose softpp_nano.cifar10",
    "predict red.png --checkpoint two.pth": "two.pth does not say which model",
}

FILES = {
    "predict red.png --checkpoint evil.ckpt": "evil.ckpt is refused.*names .*print",
    "validate --checkpoint evil.ckpt": "evil.ckpt is refused.*names .*print",
    "fit --out run --model.init_checkpoint evil.pth": "evil.pth is refused.*names .*print",
    "convert evil.pth out.safetensors": "evil.pth is refused.*names .*print, .*safetensors",
    "figures heatmap --checkpoints [evil.ckpt]": "evil.ckpt is refused.*names .*print",
    "convert red.png out.safetensors": "red.png cannot be read as weights: .*another kind",
    "convert list.pth out.safetensors": "list.pth cannot be read as weights: .*another kind",
    "convert gone.pth out.safetensors": "no file gone.pth",
    "convert one.pth out.safetensors": "one.pth holds no pyramid.*checkpoint of SOFT or SOFT",
    "convert two.pth gone/out.safetensors": "no folder gone to write to: create it",
    "convert two.pth out.txt": "must end in .safetensors, got out.txt",
    "fit --out run --model.init_checkpoint one.pth": "nothing in one.pth fits",
    "export softpp_tinny model.onnx": "no weights softpp_tinny",
    "export softpp_nano.cifar model.onnx": "softpp_nano.cifar .*softpp_nano.cifar10",
    "export softpp_nano model.pth": "must end in .onnx or .pt2, got model.pth",
    "export softpp_nano model.pt2 --traced_size 0": "--traced_size must be from 1 .*got 0",
    "export softpp_nano model.pt2 --inverse newtn": "unknown method 'newtn'; choose one of auto",
    "export softpp_nano gone/model.pt2": "no folder gone to write to: create it",
    "export gone.pth model.pt2": "no file gone.pth",
    "export one.pth model.pt2": "one.pth does not say which model",
    "export evil.pth model.pt2": "evil.pth is refused.*names .*print",
    "explore --checkpoints [gone.ckpt]": "no checkpoint gone.ckpt",
    "figures heatmap --checkpoints [gone.ckpt]": "no checkpoint gone.ckpt",
    "validate": "needs something to score: give",
    "validate --checkpoint gone.ckpt": "no checkpoint gone.ckpt",
    "test --checkpoint half.ckpt": "half.ckpt cannot be read as a checkpoint",
    "runs empty": "empty holds no .*run",
    "runs red.png": "red.png holds no .*run",
}

DATA = {
    "fit --out run --data.batch_size 0": "--data.batch_size must be at least 1, got 0",
    "fit --out run --data.batch_size -3": "--data.batch_size must be at least 1, got -3",
    "fit --out run --data.size -32": "--data.size must be from 1 to 4096 pixels, got -32",
    "fit --out run --data.interpolation cubic": "--data.interpolation must be one of .*'cubic'",
    "fit --out run --data.crop_mode foo": "--data.crop_mode must be one of .*'foo'",
    "fit --out run --data.auto_augment foo": "--data.auto_augment must be a policy.*'foo'",
    "fit --out run --data.root gone": "no folder gone.*--data.root",
    "fit --out run --data.root empty": r"empty has no images in folders.* end in \.jpg",
    "fit --out run --data.root red.png": "red.png is a file: give the folder",
    "fit --out run --data.root one": "one has images of one class, a: .*at least two, one/CLASS",
    "fit --out run --data.root whole --data.batch_size 3": "2 samples, fewer than one batch of 3",
    "fit --out run --data.flip 2": "--data.flip must be from 0 to 1, got 2",
    "fit --out run --data.erase -0.5": "--data.erase must be from 0 to 1, got -0.5",
    "fit --out run --data.root lacks": "classes of the val split.*no images of a",
    "fit --out run --config gone/recipe": "gone/recipe",
    "validate --checkpoint digits-softpp --data.root whole": "data has 2 classes.*has 10",
    "validate --checkpoint digits-softpp": "which images to score: give --data.root",
}

OPTIONS = {
    "fit --out run --lr 0.1": "no option --lr.*--model.lr",
    "fit --out run --model.lr fast": "--model.lr must be a number, got fast",
    "fit --out run --model.lr -1": "--model.lr must be at least 0, got -1",
    "fit --out run --model.lrr 1": "no option --model.lrr.*--model.lr",
    "fit --out run --model.schedule foo": "--model.schedule must be one of cosine.*got foo",
    "fit --out run --model.optimizer foo": "foo",
    "fit --out run --model.optimizer_options '{foo: 1}'": "optimizer adamw has no option 'foo'",
    "fit --out run --model.options '{toknes: 49}'": "no option 'toknes'; it has .*num_landmarks",
    "fit --out run --model.options '{landmarks: 49}'": "'landmarks'; did you mean num_landmarks",
    "fit --out run --model.warmup_epochs -3": "--model.warmup_epochs must be at least 0, got -3",
    "fit --out run --model.smoothing 3": "--model.smoothing must be .*got 3",
    "fit --out run --model.backbone softpp_nanno": "'softpp_nanno'; did you mean softpp_nano",
    "fit --out run --model.backbone softpp_nano.imagenet": "imagenet.*softpp_nano.cifar10",
    "fit --out run --model.attention sofft": "unknown attention 'sofft'; choose one of soft",
    "fit --out run --model Nonsense": "Nonsense",
    "fit --out run --trainer.max_epochs x": "--trainer.max_epochs must be a whole number, got x",
    "fit --out run --trainer.max_epochs -5": r"options \(`max_epochs` must be .* -5\)",
    "fit --out run --config broken.yaml": "broken.yaml is not YAML",
    "fit --out run --config unknown.yaml": "no option --model.lrr in unknown.yaml.*--model.lr",
    "fit --out run --config type.yaml": "--model.lr must be a number, got fast in type.yaml",
    "fit --out run --config short.yaml": "--data.batch_size must be .*, got many in short.yaml",
    "fit --out run --config red.png": "red.png is not YAML",
    "fit --out run --config list.yaml": r"list.yaml must hold options such as .*holds \['a'\]",
    "fit --out run --config three.yaml": "model in three.yaml must be options by name, got 3",
    "fit --out run --config=void.yaml": "void.yaml must hold options such as .*holds nothing",
    "predict": "images.*checkpoint must be given",
    f"predict red.png {DIGITS} --size x": "--size must be a whole number, got x",
    f"predict red.png {DIGITS} --devise cpu": "no option --devise; did you mean --device",
    "figures heatmap --layr 1": "no option --layr; did you mean --layer",
    "bench attention --preset fast": "--preset must be one of .*demo.*got fast",
    "bench lra --tasks [nonsense]": "--tasks must be one of listops.*nonsense",
    "convert two.pth out.safetensors --attention sofft": "--attention must be one of soft.*sofft",
    "explore --port x": "--port must be a whole number, got x",
    "models --nonsense": "no option --nonsense",
    "runs": "folders must be given",
}

if not torch.cuda.is_available():
    COMMANDS["bench memory --device cuda"] = "torch finds no GPU; use --device cpu"
    PREDICT[f"predict red.png {DIGITS} --device cuda"] = "torch finds no GPU; use --device cpu"
    OPTIONS["fit --out run --trainer.accelerator gpu"] = "no GPU; use --trainer.accelerator cpu"

ROWS = {**COMMANDS, **PREDICT, **FILES, **DATA, **OPTIONS}

WRONG = ("Traceback", "weights_only", "<class", "NoneType", "Parser key", "Subtypes", "\x1b")
"""What no answer may have in it: other programs' words and advice."""


class Evil:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return print, ("run",)


def accepted(*_: object, **__: object) -> None:
    raise AssertionError("the mistake was not noticed before the work began")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with a file for each kind of mistake."""
    here = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.delenv("SOFTMAXFREE_RUN", raising=False)
        patch.setattr(torch.Tensor, "backward", accepted)
        patch.setattr(torch.export, "export", accepted)
        (here / "empty").mkdir()
        (here / "note.png").write_text("no image")
        Image.new("RGB", (40, 30), "red").save("red.png")
        (here / "half.png").write_bytes((here / "red.png").read_bytes()[:60])
        torch.save({"state_dict": {}, "more": Evil()}, "evil.ckpt")
        torch.save(Evil(), "evil.pth")
        torch.save([1, 2], "list.pth")
        torch.save({"one": torch.zeros(3)}, "one.pth")
        torch.save(timm.create_model("softpp_nano", num_classes=2).state_dict(), "two.pth")
        (here / "half.ckpt").write_bytes((here / "two.pth").read_bytes()[:500])
        for place in ("train/a", "train/b", "val/b"):
            (here / "lacks" / place).mkdir(parents=True)
            shutil.copy("red.png", here / "lacks" / place)
        shutil.copytree("lacks", "whole")
        shutil.copytree("whole/train/a", "whole/val/a")
        for file in ("one.png", "two.png"):
            (here / "one/a").mkdir(parents=True, exist_ok=True)
            shutil.copy("red.png", here / "one/a" / file)
        model = "model: {class_path: softmaxfree.tasks.Classification, init_args: "
        (here / "unknown.yaml").write_text(model + "{lrr: 1}}\n")
        (here / "type.yaml").write_text(model + "{lr: fast}}\n")
        (here / "short.yaml").write_text("{model: {lr: 1e-3}, data: {batch_size: many}}")
        (here / "list.yaml").write_text("[a]")
        (here / "three.yaml").write_text("model: 3")
        (here / "void.yaml").touch()
        (here / "broken.yaml").write_text("model: [1,\n  foo: {")
        yield here


@pytest.mark.parametrize(
    ("line", "answer"),
    ROWS.items(),
    ids=ROWS,
)
def test_a_mistake_is_answered_with_one_sentence(line: str, answer: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    error, output = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(error), pytest.raises(SystemExit) as stop:
        main(shlex.split(line))
    assert stop.value.code in (1, 2)
    assert "training" not in output.getvalue()
    *notices, sentence = error.getvalue().splitlines()
    assert not any("error" in notice for notice in notices)
    assert sentence.startswith("softmaxfree: error: ")
    assert re.search(answer, sentence), sentence
    assert not any(word in sentence for word in WRONG)
    assert sorted(folder.rglob("*")) == before  # nothing is begun, and left behind


CALLS: dict[str, Callable[[], object]] = {
    "unknown attention 'sofft'; choose one of soft": lambda: nano(attention="sofft"),
    "num_landmarks must be at least 1, got 0": lambda: nano(num_landmarks=0),
    "ratios must be 4 numbers.*got (2, 1)": lambda: nano(ratios=(2, 1)),
    "unknown method 'newtn'; choose one of auto": lambda: nano(inverse="newtn"),
    "iters must be a whole number from 1 to 1000, got 0": lambda: nano(iters=0),
    "img_size must be a side or (height, width), got 0": lambda: nano(img_size=0),
    "images must have 3 channels, got shape (1, 1, 8, 8)": lambda: nano()(rand(1, 1, 8, 8)),
    "images must be (B, 3, H, W), got shape (3, 8, 8)": lambda: nano()(rand(3, 8, 8)),
    "floating-point type, got torch.uint8": lambda: nano()(rand(1, 3, 8, 8).byte()),
    "num_heads must divide dim, got dim=64, num_heads=5": lambda: SoftmaxFreeAttention(64, 5),
    "size=(3, 4) makes 12 tokens, but x": lambda: SoftmaxFreeAttention(8)(rand(1, 9, 8), (3, 4)),
    "x must be (B, N, 8), got": lambda: SoftmaxFreeAttention(8)(rand(1, 9, 4), (3, 3)),
    "ResNet": lambda: replace_attention(timm.create_model("resnet10t"), "soft"),
    "got MultiheadAttention; pass nn.ModuleList([attention])": lambda: replace_attention(
        torch.nn.MultiheadAttention(8, 2), "soft"
    ),
    "images must be (B, channels, H, W), got shape (3, 8, 8)": lambda: diagnose(
        nano(), rand(3, 8, 8)
    ),
    "ResNet has no attention of this package": lambda: diagnose(
        timm.create_model("resnet10t"), rand(1, 3, 8, 8)
    ),
    "trained_size must be .*, got 0": lambda: diagnose(nano(), rand(1, 3, 8, 8), trained_size=0),
    "there is an attention 'soft' already": lambda: register_attention("soft")(
        SoftmaxFreeAttention
    ),
    "no weights gone: .*softpp_nano.cifar10": lambda: find_weights("gone"),
}


def nano(**arguments: object) -> torch.nn.Module:
    model: torch.nn.Module = timm.create_model("softpp_nano", **arguments)
    return model


@pytest.mark.parametrize("answer", CALLS)
def test_a_mistake_in_python_is_answered_with_one_sentence(answer: str) -> None:
    pattern = re.escape(answer).replace(re.escape(".*"), ".*")
    with pytest.raises(ValueError, match=pattern) as error:
        CALLS[answer]()
    assert "\n" not in str(error.value)
