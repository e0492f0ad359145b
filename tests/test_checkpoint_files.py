"""Damaged checkpoints are seen, and the one before is taken."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from softmaxfree.checkpoint_files import damage, keep_previous, sound_checkpoint, write_checkpoint
from softmaxfree.errors import UserError
from softmaxfree.models.checkpoints import read_checkpoint, read_run_checkpoint


def write(path: Path, step: int = 1) -> dict[str, Any]:
    content = {"global_step": step, "weights": torch.arange(64.0), "more": torch.ones(3, 5)}
    write_checkpoint(content, path)
    return content


def flip(path: Path, *places: int) -> None:
    """Turns bytes into others."""
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 0x55
    path.write_bytes(content)


def test_every_changed_byte_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    written = write(path)
    whole = path.read_bytes()
    assert damage(path) is None
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert torch.equal(found["weights"], written["weights"])
    assert whole[-22:].startswith(b"PK\5\6")  # nothing after the directory
    mark = range(whole.rindex(b"sha256"), whole.rindex(b"here: ") + 6)
    for place in [*range(0, len(whole), 13), *range(len(whole) - 400, len(whole))]:
        path.write_bytes(whole)
        flip(path, place)
        if place not in mark:  # without which torch's own checksums count
            assert damage(path) is not None, place


def test_of_a_file_without_our_checksum_torchs_own_are_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"weights": torch.arange(64.0)}, path)
    assert damage(path) is None
    flip(path, path.read_bytes().index(torch.arange(64.0).numpy().tobytes()) + 99)
    assert damage(path) == "the checksum of last/data/0 is wrong"


def test_a_checkpoint_of_another_name_is_checked_too(tmp_path: Path) -> None:
    write_checkpoint({"weights": torch.arange(64.0)}, tmp_path / "renamed.pth")
    assert read_checkpoint(tmp_path / "renamed.pth").keys() == {"weights"}
    flip(tmp_path / "renamed.pth", 600)
    with pytest.raises(
        UserError, match=r"renamed.pth cannot be read as weights \(its checksum is wrong"
    ):
        read_checkpoint(tmp_path / "renamed.pth")


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.9])
def test_a_truncated_file_is_seen(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "best.ckpt"
    write(path)
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(UserError, match=r"best.ckpt cannot be read as a checkpoint .* truncated"):
        read_run_checkpoint(path)


def test_a_compressed_file_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**6))
    assert damage(path) == "it is compressed, which no checkpoint of ours is"


def test_the_previous_checkpoint_is_taken_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    write(last, 1)
    keep_previous(last)
    write(last, 2)
    assert read_run_checkpoint(last)["global_step"] == 2
    assert capsys.readouterr().err == ""

    flip(last, *range(600, 664))
    assert read_run_checkpoint(last)["global_step"] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"softmaxfree: {last} cannot be read as a checkpoint (")
    assert line.endswith(f"; the checkpoint before it, {previous}, is taken")

    last.unlink()
    assert sound_checkpoint(last) == previous
    previous.write_bytes(b"")
    with pytest.raises(UserError, match=r"last.ckpt is not there: .* so is previous.ckpt"):
        sound_checkpoint(last)


def test_the_previous_checkpoint_is_kept_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.link", refuse)
    write(tmp_path / "last.ckpt", 5)
    keep_previous(tmp_path / "last.ckpt")
    keep_previous(tmp_path / "last.ckpt")  # killed before the next was in its place
    assert read_run_checkpoint(tmp_path / "last.ckpt")["global_step"] == 5
