"""Files that others send: images are read, all else is refused in a sentence."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from softmaxfree.explore.uploads import FORMATS, LONGEST_SIDE, MOST_BYTES, read_upload

from .conftest import noise


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG that claims to be so large."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000))


@pytest.mark.parametrize("kind", FORMATS)
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
    Image.new("RGB", (LONGEST_SIDE * 2, 300)).save(tmp_path / "wide.png")
    assert read_upload(tmp_path / "wide.png").size == (LONGEST_SIDE, 150)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    noise(0).image.save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    files = {
        "notes.png": (b"not an image", r"notes\.png is no image that can be read: send one of PNG"),
        "empty.jpg": (b"", "no image"),
        "drawing.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        "page.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image"),
        "half.png": (whole[: len(whole) // 2], "of the format PNG and cannot be decoded"),
        "bomb.png": (png_header(60_000, 60_000), "far more pixels .* may have 40 million"),
        "large.png": (png_header(8_000, 6_000), "8,000 x 6,000 pixels by its header"),
        "larger.png": (png_header(12_000, 9_000), "pixels by its header"),
        "thread.png": (png_header(4_000, 10), "4,000 x 10 pixels, and one side may be 20 times"),
        "heavy.png": (bytes(MOST_BYTES + 1), r"heavy\.png has 10\.0 MB, and files may have 10 MB"),
        f"{'long' * 40}.png": (b"", r"^(long)*\w*\.\.\. is no image"),
    }
    for name, (content, sentence) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            read_upload(tmp_path / name)
