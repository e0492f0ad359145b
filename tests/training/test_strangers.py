"""Runs and checkpoints of strangers: nothing of them is run, fetched or written elsewhere."""

import copy
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from matplotlib.figure import Figure
from PIL import Image

from softmaxfree.errors import UserError
from softmaxfree.files import append, write_picture
from softmaxfree.models.checkpoints import read_checkpoint, read_run_checkpoint
from softmaxfree.tasks.predict import run as predict
from softmaxfree.training.checkpoint import AtomicCheckpointIO
from softmaxfree.training.command import run
from softmaxfree.training.log import LineLogger

from .conftest import SMALL, Fit

Alter = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes a checkpoint and its configuration."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint of a run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    config = {**SMALL, "data": {**SMALL["data"], "init_args": {**SMALL["data"]["init_args"]}}}
    config["data"]["init_args"] |= {"eval_sizes": [16], "num_workers": 0}
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    run(
        "fit",
        [
            "--config", str(folder / "small.yaml"), "--out", str(folder / "run"),
            "--trainer.max_steps=1", "--trainer.limit_val_batches=1",
        ],
    )  # fmt: skip
    return read_run_checkpoint(folder / "run" / "last.ckpt")


@pytest.fixture
def evil(
    trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Alter], Path]:
    """Writes the checkpoint of a stranger, beside a module that leaves a file behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as with python -m
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\nPath('canary').touch()\ndef call(*_, **__): pass\n"
    )
    Image.new("RGB", (16, 16)).save("image.png")

    def write(alter: Alter) -> Path:
        checkpoint = {**trained, "hyper_parameters": {**trained["hyper_parameters"]}}
        config = yaml.safe_load(checkpoint["config"])
        alter(checkpoint, config)
        checkpoint["config"] = yaml.safe_dump(config)
        torch.save(checkpoint, "file.ckpt")
        return tmp_path / "file.ckpt"

    return write


def canaries() -> list[Path]:
    return [path for path in Path().rglob("*canary*") if path.is_file()]


@pytest.mark.parametrize("command", ["validate", "test", "fit"])
def test_data_is_not_opened_through_a_shell(evil: Any, command: str) -> None:
    def shell(checkpoint: dict[str, Any], config: dict[str, Any]) -> None:
        config["data"]["init_args"] |= {"name": "wds/", "root": "pipe:touch canary; cat x"}

    path = evil(shell)
    with pytest.raises(UserError, match=r"--data.name and --data.root, which are not taken from"):
        run(command, ["--checkpoint", str(path)])
    assert not canaries()
    if command == "validate":
        run(command, ["--checkpoint", str(path), "--data.name=digits", "--data.root=null"])
        assert not canaries()


def test_scoring_builds_nothing_but_the_model_and_the_data(evil: Any, capsys: Any) -> None:
    def callbacks(checkpoint: dict[str, Any], config: dict[str, Any]) -> None:
        config["trainer"]["callbacks"] = [
            {"class_path": "evil.Callback"},
            {
                "class_path": "lightning.pytorch.callbacks.LambdaCallback",
                "init_args": {"setup": "evil.call"},
            },
        ]
        config["trainer"]["profiler"] = {
            "class_path": "lightning.pytorch.profilers.SimpleProfiler",
            "init_args": {"dirpath": ".", "filename": "canary"},
        }

    path = evil(callbacks)
    run("validate", ["--checkpoint", str(path)])
    shown = capsys.readouterr()
    assert "val/accuracy" in shown.out
    assert "not taken from" in shown.err
    assert "trainer.callbacks, trainer.profiler" in shown.err
    with pytest.raises(UserError, match=r"--trainer.callbacks and --trainer.profiler, which are"):
        run("fit", ["--checkpoint", str(path)])
    assert not canaries()


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_path": "evil.pth"},
        {"pretrained": True},
        {"pretrained": True, "pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/x.pth"}},
        {"pretrained": True, "pretrained_cfg": {"file": "evil.pth"}, "cache_dir": "canary"},
    ],
    ids=lambda options: list(options)[-1],
)
def test_weights_come_from_the_checkpoint_alone(
    evil: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With timm below 1.0.26 the first was unpickled."""

    def fetch(checkpoint: dict[str, Any], config: dict[str, Any]) -> None:
        own = checkpoint["hyper_parameters"]["options"]
        checkpoint["hyper_parameters"]["options"] = {**own, **options}
        config["model"]["init_args"]["options"] |= options

    def touched(*_: Any, **__: Any) -> None:
        Path("canary").touch()

    monkeypatch.setattr(timm.models._factory, "load_checkpoint", touched)
    monkeypatch.setattr(timm.models._builder, "load_pretrained", touched)
    path = evil(fetch)
    predict([Path("image.png")], path)
    run("validate", ["--checkpoint", str(path)])
    assert not canaries()


def test_letters_that_steer_a_terminal_are_not_printed(evil: Any, capsys: Any) -> None:
    def names(checkpoint: dict[str, Any], config: dict[str, Any]) -> None:
        classes = [f"\x1b]0;owned\x07{number}" for number in range(10)]
        checkpoint["images"] = {**checkpoint["images"], "classes": classes}

    predict([Path("image.png")], evil(names))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"\x1b]0;owned\x07" in printed


def test_an_archive_that_is_larger_inside_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.2 MB of such took 1.2 GB."""
    monkeypatch.chdir(tmp_path)
    torch.save({"norm.weight": torch.zeros(10**6)}, "plain.pth")
    with zipfile.ZipFile("plain.pth") as plain:
        records = {record.filename: plain.read(record) for record in plain.infolist()}
    with zipfile.ZipFile("bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, content in records.items():
            bomb.writestr(name, content)
    whole = Path("plain.pth").read_bytes()
    Path("behind.pth").write_bytes(whole + b"more")  # where readers may disagree on the directory
    Path("half.pth").write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    for name, reason in {
        "bomb.pth": "compressed",
        "behind.pth": "(does not end with its directory|truncated or damaged)",
        "half.pth": "truncated",
    }.items():
        for read in (read_checkpoint, read_run_checkpoint):
            with pytest.raises(UserError, match=f"{name} .*{reason}"):
                read(Path(name))
        with pytest.raises(UserError, match=f"{name} .*{reason}"):
            run("validate", ["--config", str(_small()), "--checkpoint", name])


def _small() -> Path:
    Path("small.yaml").write_text(yaml.safe_dump(SMALL))
    return Path("small.yaml")


def test_a_tensor_that_is_larger_than_what_is_stored_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "expanded.pth"
    torch.save({"state_dict": {"position.grid": torch.zeros(1).expand(10**6)}}, path)
    assert path.stat().st_size < 5000
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(UserError, match=r"list.pth cannot be read .*it holds a list"):
        read_run_checkpoint(tmp_path / "list.pth")
    for read in (read_checkpoint, read_run_checkpoint):
        with pytest.raises(UserError, match=r"of shape \(1000000,\) is not stored as such"):
            read(path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("callbacks", [[]]), ("state_dict", "evil"), ("state_dict", {"a": 1}), ("loops", 3),
        ("pytorch-lightning_version", {"a": 1}), ("pytorch-lightning_version", "1; evil"),
        ("optimizer_states", {}), ("optimizer_states", [5]), ("callbacks", {"RunCheckpoint": 5}),
        ("averaging_state", 5), ("hyper_parameters", None), ("global_step", "7"),
    ],
)  # fmt: skip
def test_parts_of_other_types_are_refused(part: str, value: Any, tmp_path: Path) -> None:
    """Lightning relies on them, and would end in a traceback."""
    torch.save({"state_dict": {}, part: value}, tmp_path / "file.ckpt")
    with pytest.raises(UserError, match=r"file\.ckpt cannot be read as a checkpoint \(its "):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "file.ckpt")


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"accelerator": "foo"}, []),
        ({"barebones": True, "fast_dev_run": 2}, []),
        ({"precision": "foo"}, []),
        ({}, ["--trainer.strategy=junk"]),
    ],
    ids=["accelerator", "barebones", "precision", "strategy"],
)
def test_a_trainer_that_cannot_be_built_is_a_sentence(
    evil: Any, trainer: dict[str, Any], words: list[str]
) -> None:
    path = evil(lambda _, config: config["trainer"].update(trainer))
    with pytest.raises(
        UserError, match=r"no accelerator 'foo'|no trainer can be|--trainer.precision"
    ):
        run("validate", ["--checkpoint", str(path), *words])


def test_a_state_that_does_not_fit_is_a_sentence(evil: Any) -> None:
    def counted(checkpoint: dict[str, Any], config: dict[str, Any]) -> None:
        checkpoint["loops"] = copy.deepcopy(checkpoint["loops"])
        checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] = "a"

    alterations: list[Alter] = [
        lambda checkpoint, _: checkpoint.update(optimizer_states=[{"a": 1}]), counted
    ]  # fmt: skip
    for alter in alterations:
        path = evil(alter)
        with pytest.raises(UserError, match=r"cannot be gone on with \((Key|Value)Error: "):
            run("fit", ["--checkpoint", str(path), "--out", "run"])


def test_links_are_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "run.png", "example.png", "last.ckpt"):
        (folder / name).symlink_to(victim)
    logger = LineLogger(folder)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_metrics({"loss": 0.5}, 2)
    write_picture(folder / "example.png", Image.new("RGB", (2, 2)))
    write_picture(folder / "run.png", Figure())
    AtomicCheckpointIO().save_checkpoint({"epoch": 1}, folder / "last.ckpt")
    assert victim.read_text() == "mine"
    assert not any(path.is_symlink() for path in folder.iterdir())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    for name in ("run.png", "example.png"):
        Image.open(io.BytesIO((folder / name).read_bytes())).verify()


def test_a_link_to_nothing_makes_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    append(tmp_path / "metrics.jsonl", b"{}")
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"{}\n"


def test_a_run_leaves_what_links_in_its_folder_point_to(fit: Fit, tmp_path: Path) -> None:
    names = [
        "best.ckpt", "config.yaml", "run.json", "metrics.jsonl", "run.png", "example.png",
    ]  # fmt: skip
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / f"victim-{name}").write_text("mine")
        (tmp_path / "run" / name).symlink_to(tmp_path / f"victim-{name}")
    folder = fit()
    for name in names:
        assert (tmp_path / f"victim-{name}").read_text() == "mine"
        assert (folder / name).is_file()
        assert not (folder / name).is_symlink()
