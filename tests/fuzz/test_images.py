"""Image files of all kinds, whole and damaged: each is an image within the limits or refused.

SOFTMAXFREE_FUZZ_CASES sets the number of cases.
"""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from softmaxfree.data.image_files import OWN, ImageFileError, load_image, read_image
from softmaxfree.errors import UserError
from softmaxfree.lab.explore.uploads import LIMITS, read_upload

from ..processes import exit_code
from .records import recorded

CASES = int(os.environ.get("SOFTMAXFREE_FUZZ_CASES", "100"))
SETTINGS: dict[str, Any] = {
    "max_examples": CASES,
    "deadline": None,
    "database": None,
    "derandomize": "SOFTMAXFREE_FUZZ_CASES" not in os.environ,
    "suppress_health_check": list(HealthCheck),
}
MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P", "RGB"),
    "BMP": ("1", "L", "P", "RGB"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "LAB", "I;16", "I", "F"),
    "PPM": ("1", "L", "RGB"),
    "JPEG2000": ("L", "RGB"),
}
NUMBERS = {"I;16": np.uint16, "I": np.int32, "F": np.float32}


@st.composite
def images(draw: st.DrawFn) -> tuple[str, Image.Image]:
    """A format and an image in a mode that it takes."""
    kind = draw(st.sampled_from(sorted(MODES)))
    mode = draw(st.sampled_from(MODES[kind]))
    width, height = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    pixels = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if mode in NUMBERS:
        scale = draw(st.sampled_from([1.0, 255.0, 65_535.0, -1.0, 1e9, float("nan")]))
        with np.errstate(invalid="ignore", over="ignore"):
            values = (pixels.random((height, width)) * scale).astype(NUMBERS[mode])
        return kind, Image.fromarray(values)
    image = Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8))
    return kind, Image.new("LAB", image.size) if mode == "LAB" else image.convert(mode)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """An image's file, with an orientation of any number, damaged in several places or not."""
    kind, image = draw(images())
    exif = Image.Exif()
    exif[0x0112] = draw(st.integers(0, 65_535) | st.integers(1, 8))
    stream = io.BytesIO()
    extra: dict[str, Any] = {"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF") else {}
    image.save(stream, kind, **extra)
    content = bytearray(stream.getvalue())
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(content) - 1) | st.integers(0, min(99, len(content) - 1)))
        content[place] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.just(len(content)) | st.integers(1, len(content)))])


@st.composite
def large_pngs(draw: st.DrawFn) -> bytes:
    """A PNG that is whole in all but its pixels: its header says any size."""
    side = st.integers(0, 2**32 - 1) | st.integers(0, 20_000) | st.integers(0, 3)
    depth, colour = draw(st.sampled_from([(1, 0), (8, 2), (16, 0), (8, 6), (8, 3), (16, 6)]))
    header = struct.pack(">IIBBBBB", draw(side), draw(side), depth, colour, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for name, chunk in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(name + chunk))
        content += struct.pack(">I", len(chunk)) + name + chunk + checksum
    return content


def check(image: Image.Image, pixels: int, longest: int | None) -> None:
    assert image.mode == "RGB"
    assert not image.info
    assert 0 < image.width * image.height <= pixels
    assert longest is None or max(image.size) <= longest
    assert np.asarray(image).shape == (image.height, image.width, 3)


def is_one_sentence(error: UserError, part: str = "") -> None:
    assert "\n" not in str(error)
    assert part in str(error)


def is_read_or_refused(content: bytes, path: Path) -> bool:
    """Returns whether the file was refused."""
    path.write_bytes(content)
    refused = False
    for read, limits in ((read_image, OWN), (read_upload, LIMITS)):
        try:
            check(read(path), limits.pixels, limits.longest)
        except ImageFileError as error:
            is_one_sentence(error, "file.bin cannot be read as an image: ")
            refused = True
    return refused


def test_a_file_is_read_or_refused(tmp_path: Path) -> None:
    @settings(**SETTINGS)
    @given(content=files() | large_pngs() | st.binary(max_size=200))
    @recorded("images")
    def every(content: bytes) -> bool:
        return is_read_or_refused(content, tmp_path / "file.bin")

    assert exit_code(every) == 0


def test_whole_files_of_usual_modes_are_read(tmp_path: Path) -> None:
    @settings(**SETTINGS)
    @given(drawn=images(), turn=st.integers(1, 8))
    @recorded("whole images")
    def every(drawn: tuple[str, Image.Image], turn: int) -> bool:
        kind, image = drawn
        if image.mode in ("LAB", "I", "F"):
            return False
        exif = Image.Exif()
        exif[0x0112] = turn
        stream = io.BytesIO()
        image.save(stream, kind, **({"exif": exif} if kind in ("JPEG", "PNG", "WEBP") else {}))
        turned = turn >= 5 and kind in ("JPEG", "PNG", "WEBP")
        expected = image.size[::-1] if turned else image.size
        assert load_image(stream).size == expected
        assert load_image(stream, annotated=image.size).size == image.size
        return False

    assert exit_code(every) == 0
