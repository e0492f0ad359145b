"""Files that others send: images are read, all else is refused in a sentence."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from softmaxfree.lab.explore.uploads import LIMITS, EndedError, Inbox, Photos, read_upload

from ...data.test_image_files import png_header
from .conftest import noise


@pytest.mark.parametrize("kind", LIMITS.formats)
def test_images_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "image.of-any-name"
    noise(0).image.save(path, kind)
    image = read_upload(path)
    assert (image.mode, image.size) == ("RGB", (48, 40))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_images_of_other_colours_are_read(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "grey.tiff"
    if mode == "I;16":
        Image.fromarray(np.full((8, 8), 128 * 256, np.uint16)).save(path)
    else:
        Image.new("RGB", (8, 8), (128, 128, 128)).convert(mode).save(path)
    image = read_upload(path)
    assert image.mode == "RGB"
    assert abs(np.asarray(image).mean() - 128) <= 3


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    noise(0).image.save(tmp_path / "turned.jpg", exif=exif)
    assert read_upload(tmp_path / "turned.jpg").size == (40, 48)


def test_a_large_image_is_reduced(tmp_path: Path) -> None:
    Image.new("RGB", (2 * 2048, 300)).save(tmp_path / "wide.png")
    assert read_upload(tmp_path / "wide.png").size == (2048, 150)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    noise(0).image.save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    files = {
        "notes.png": (
            b"not an image",
            r"notes\.png cannot be read as an image: it does not begin as PNG",
        ),
        "empty.jpg": (b"", "it does not begin as"),
        "drawing.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it does not begin as"),
        "page.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it does not begin as"),
        "half.png": (whole[: len(whole) // 2], "it begins as PNG and cannot be decoded"),
        "bomb.png": (png_header(60_000, 60_000), "far more pixels .* may have 40 million"),
        "large.png": (png_header(8_000, 6_000), "8,000 x 6,000 pixels by its header"),
        "larger.png": (png_header(12_000, 9_000), "pixels by its header"),
        "thread.png": (png_header(4_000, 10), "4,000 x 10 pixels, and one side may be 20 times"),
        "heavy.png": (bytes(10 * 2**20 + 1), r"it has 10\.0 MB, and files may have 10 MB"),
        f"{'long' * 40}.png": (b"", r"^(long)*\w*\.\.\. cannot be read"),
    }
    for name, (content, sentence) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            read_upload(tmp_path / name)


def test_a_file_is_taken_once_and_only_if_it_was_sent(tmp_path: Path) -> None:
    """The pictures of examples are in the same folder, and their names are known to everybody."""
    sent, example = tmp_path / "sent.png", tmp_path / "example.png"
    for path in (sent, example):
        noise(1).image.save(path)
    files = {str(sent)}
    inbox = Inbox(files, lambda: {str(example)})
    with pytest.raises(ValueError, match="was not sent by you"):
        inbox.take(str(example))
    assert inbox.take(str(sent)) == noise(1).image
    assert not sent.exists()
    assert not files
    assert inbox.take(str(sent)) == noise(1).image  # another visitor has sent the same meanwhile
    for number in range(10):
        noise(2).image.save(tmp_path / f"{number}.png")
        files.add(str(tmp_path / f"{number}.png"))
        inbox.take(str(tmp_path / f"{number}.png"))
    with pytest.raises(ValueError, match="or was read before"):
        inbox.take(str(sent))
    files.add(str(example))  # somebody has sent what the page shows, under the same name
    assert inbox.take(str(example)) == noise(1).image
    assert example.exists()


def test_images_are_kept_as_long_as_there_is_room() -> None:
    size = 4 * 48 * 40
    photos = Photos([noise(0)], most_bytes=2 * size)
    keys = [photos.keep(noise(seed)) for seed in (1, 2, 3)]
    assert photos.get(keys[2]) == noise(3)
    assert photos.get(noise(0).digest) == noise(0)
    with pytest.raises(EndedError, match=r"no longer kept, .*: upload it again"):
        photos.get(keys[0])
    with pytest.raises(EndedError, match="session has ended"):
        photos.get(None)
