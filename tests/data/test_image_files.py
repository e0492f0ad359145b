"""The one reader of images: what it makes of files of all kinds, and what it refuses."""

import copy
import math
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from softmaxfree.data.image_files import (
    FORMATS,
    OWN,
    ImageFileError,
    check_resized,
    load_image,
    read_image,
    sizes,
)
from softmaxfree.data.images import ImageData
from softmaxfree.data.paths import below, read_file, shown
from softmaxfree.data.samples import SampleStream
from softmaxfree.data.scenes import open_scenes
from softmaxfree.data.sources import Source, open_source
from softmaxfree.errors import LARGEST_SIZE, UserError, check_size

# The corners of a picture tell how it lies: red, green; blue, white.
CORNERS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8)
UPRIGHT = CORNERS.repeat(8, 0).repeat(16, 1)  # 16 rows of 32 pixels
LYING = {  # as the camera saves what is upright, by the orientation it writes (TIFF 6.0)
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: UPRIGHT.transpose(1, 0, 2)[::-1],
    7: UPRIGHT.transpose(1, 0, 2)[::-1, ::-1],
    8: UPRIGHT.transpose(1, 0, 2)[:, ::-1],
}


def write_photo(path: Path, orientation: int) -> Path:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.ascontiguousarray(LYING[orientation])).save(path, exif=exif, quality=100)
    return path


def is_upright(image: Image.Image) -> bool:
    return image.size == (32, 16) and np.abs(np.asarray(image, int) - UPRIGHT).mean() < 8


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG that claims to be so large."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000))


@pytest.mark.parametrize("end", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", LYING)
def test_photographs_are_turned_upright(orientation: int, end: str, tmp_path: Path) -> None:
    path = write_photo(tmp_path / f"photo.{end}", orientation)
    image = read_image(path)
    assert is_upright(image)
    assert (32, 16) in sizes(path)
    image.save(tmp_path / "again.png")  # and say nothing of how they lay
    assert is_upright(read_image(tmp_path / "again.png"))


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"MM"])
def test_broken_exif_is_passed_over(exif: bytes, tmp_path: Path) -> None:
    Image.fromarray(UPRIGHT).save(tmp_path / "odd.jpg", exif=exif, quality=100)
    assert is_upright(read_image(tmp_path / "odd.jpg"))


def test_an_orientation_that_there_is_none_of_is_passed_over(tmp_path: Path) -> None:
    for number, value in enumerate((0, 9, 60_000)):
        exif = Image.Exif()
        exif[0x0112] = value
        path = tmp_path / f"{number}.jpg"
        Image.fromarray(UPRIGHT).save(path, exif=exif, quality=100)
        assert is_upright(read_image(path))


def test_image_folders_give_photographs_upright(tmp_path: Path) -> None:
    for orientation in LYING:
        write_photo(tmp_path / "train" / "class" / f"{orientation}.jpg", orientation)
    for name, split in (("", ""), ("torch/image_folder", "train")):
        source = open_source(name, str(tmp_path / "train"), split)
        assert isinstance(source, Source)
        assert len(source) == 8
        assert all(is_upright(source.load(index)[0]) for index in range(8))


@pytest.mark.parametrize("size", [(32, 16), (16, 32)], ids=["upright", "lying"])
def test_boxes_of_photographs_are_of_the_size_that_is_annotated(
    size: tuple[int, int], tmp_path: Path
) -> None:
    """Some tools annotate what people see, some what the file has."""
    write_photo(tmp_path / "JPEGImages" / "photo.jpg", 6)
    for folder in ("Annotations", "ImageSets/Main"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ImageSets/Main/val.txt").write_text("photo\n")
    (tmp_path / "Annotations/photo.xml").write_text(
        f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>"
        "<object><name>red</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>8</xmax>"
        "<ymax>8</ymax></bndbox></object></annotation>"
    )
    image, objects = open_scenes("voc", str(tmp_path), "val").load(0)
    assert image.size == size
    assert is_upright(image) == (size == (32, 16))
    assert objects.boxes.tolist() == [[0, 0, 8, 8]]


GREY = np.linspace(0, 1, 256).reshape(16, 16)


@pytest.mark.parametrize(
    ("values", "end"),
    [
        ((GREY * 255).astype(np.uint8), "png"),
        ((GREY * 255).astype(np.uint16) * 256, "png"),
        ((GREY * 255).astype(np.uint16) * 256, "tiff"),
        ((GREY * 255).astype(np.int32), "tiff"),
        ((GREY * 255).astype(np.int32) * 256, "tiff"),
        (GREY.astype(np.float32), "tiff"),
        ((GREY * 255).astype(np.float32), "tiff"),
    ],
    ids=["8 bits", "16 bits", "16 bits TIFF", "32 bits to 255", "32 bits", "to 1", "to 255"],
)
def test_brightness_does_not_depend_on_how_it_is_written(
    values: Any, end: str, tmp_path: Path
) -> None:
    Image.fromarray(values).save(tmp_path / f"grey.{end}")
    found = np.asarray(read_image(tmp_path / f"grey.{end}"), dtype=float)
    assert found.shape == (16, 16, 3)
    assert np.abs(found - 255 * GREY[..., None]).max() <= 1


@pytest.mark.parametrize(
    "values", [[-1.0, 1.0], [0.0, 256.0], [0.0, math.nan], [0.0, math.inf], [-1, 5], [70_000, 1]]
)
def test_brightness_that_means_nothing_is_refused(values: list[Any], tmp_path: Path) -> None:
    kind = np.float32 if isinstance(values[0], float) else np.int32
    Image.fromarray(np.array([values], kind)).save(tmp_path / "odd.tiff")
    with pytest.raises(ImageFileError, match=r"odd\.tiff .* its pixels are from .* 8 bits"):
        read_image(tmp_path / "odd.tiff")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "RGB"])
def test_all_colours_become_rgb(mode: str, tmp_path: Path) -> None:
    colour = (255, 255, 255) if mode == "1" else (200, 100, 50)
    image = Image.new("RGB", (8, 8), colour).convert(mode)
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    image.save(path)
    found = read_image(path)
    assert found.mode == "RGB"
    expected = np.asarray(image.convert("RGB"), float)
    assert np.abs(np.asarray(found, float) - expected).max() <= 3


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "palette.png", transparency=b"\x00\x80")
    found = read_image(tmp_path / "palette.png")  # warnings are errors here
    assert found.getpixel((0, 0)) == (10, 20, 30)


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind: str, tmp_path: Path) -> None:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {kind}")
    path = tmp_path / "image.of-any-name"
    Image.fromarray(UPRIGHT).save(path, kind)
    image = read_image(path)
    assert image.size == (32, 16)
    assert not image.info
    assert pickle.loads(pickle.dumps(image)) == copy.deepcopy(image) == image


def test_what_cannot_be_read_is_said_in_one_sentence(tmp_path: Path) -> None:
    Image.fromarray(UPRIGHT).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    files = {
        "notes.png": (b"not an image", "it does not begin as JPEG, PNG, .* files do"),
        "empty.jpg": (b"", "it does not begin as"),
        "page.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it does not begin as"),
        "half.png": (whole[: len(whole) // 2], "it begins as PNG and cannot be decoded"),
        "bomb.png": (png_header(60_000, 60_000), "far more pixels .* may have 100 million"),
        "large.png": (png_header(13_000, 13_000), "13,000 x 13,000 pixels by its header"),
        "warned.png": (png_header(9_500, 10_600), "9,500 x 10,600 pixels by its header"),
        "thread.png": (png_header(40_000, 10), "40,000 x 10 pixels, and one side may be 100"),
    }
    for name, (content, sentence) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{name} cannot be read as an image: .*{sentence}"):
            read_image(path)
    for path, sentence in (
        (tmp_path / "none.png", "there is no such file"),
        (tmp_path, "not a file"),
        (Path("/dev/zero"), "not a file"),
        (Path("a\0b"), "null"),
        (tmp_path / ("long" * 200), "too long"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_image(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "train" / "class" / "pipe.jpg"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="not a file"):
        read_image(pipe)
    with pytest.raises(UserError, match="is a pipe or a device"):
        read_file(pipe)
    source = open_source("", str(tmp_path / "train"), "")
    assert isinstance(source, Source)
    with pytest.raises(UserError, match="not a file"):
        source.load(0)


def test_large_files_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """169 million pixels in 20 kB would take 1.9 GB."""
    Image.new("1", (13_000, 13_000)).save(tmp_path / "small.png")
    decoded: list[Any] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded.append)
    with pytest.raises(UserError, match="pixels by its header, and images may have 100 million"):
        read_image(tmp_path / "small.png")
    assert not decoded


def test_streams_are_read_as_files_are(tmp_path: Path) -> None:
    with write_photo(tmp_path / "photo.jpg", 6).open("rb") as file:
        assert is_upright(load_image(file))


def test_images_that_others_have_opened_are_turned_too(tmp_path: Path) -> None:
    """As timm gives those of shards: in RGB, and not upright."""
    with Image.open(write_photo(tmp_path / "photo.jpg", 6)) as file:
        image = file.convert("RGB")
    assert not is_upright(image)
    stream = SampleStream([(image, 3)], lambda image: image, seed=0)  # type: ignore[arg-type]
    (sample,) = stream
    assert is_upright(sample.image)  # type: ignore[arg-type]


def test_sides_to_resize_to() -> None:
    check_size(None)
    for size in (1, 224, LARGEST_SIZE):
        check_size(size)
    for size in (-1, 0, LARGEST_SIZE + 1, 100_000):
        with pytest.raises(UserError, match=f"--size must be from 1 to 4096 pixels, got {size}"):
            check_size(size)
    with pytest.raises(UserError, match=r"--data\.size must be from 1 to 4096 pixels, got 0"):
        ImageData(size=0)
    with pytest.raises(UserError, match=r"--data\.eval_sizes must be .*, got 5000"):
        ImageData(size=16, eval_sizes=[16, 5000])
    for part in (0, 1e-320, -1, 2):
        with pytest.raises(UserError, match=r"--data\.crop_pct must be from 0.1 to 1, got "):
            ImageData(size=16, crop_pct=part)
    with pytest.raises(UserError, match=r"--data\.interpolation must be one of .*, got 'random'"):
        ImageData(size=16, interpolation="random")
    with pytest.raises(UserError, match=r"--data\.train_interpolation must be .*, got 'cubic'"):
        ImageData(size=16, train_interpolation="cubic")
    for name, value, sentence in (
        ("crop_mode", "foo", "one of rrc, rkrc, rkrr, pad, got 'foo'"),
        ("auto_augment", "foo", "a policy of timm, such as .*, got 'foo'"),
        ("batch_size", 0, "at least 1, got 0"),
        ("eval_batch_size", 0, "at least 1, got 0"),
        ("num_workers", -1, "at least 0, got -1"),
    ):
        with pytest.raises(UserError, match=rf"--data\.{name} must be {sentence}"):
            ImageData(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"digits are embedded .* --data.root is here: leave it"):
        ImageData("digits", root="here")
    assert ImageData(root="here").dataset == ""
    check_resized(Image.new("1", (100, 200)), 4096)
    with pytest.raises(UserError, match="9 x 900 pixels has 4,096 x 409,600 when it is resized"):
        check_resized(Image.new("1", (9, 900)), 4096)
    assert OWN.pixels >= LARGEST_SIZE**2


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x.jpg", "a/../../x.jpg", "..", "a\0.jpg"])
def test_names_that_leave_a_folder_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no name of a file below"):
        below(tmp_path, name)


def test_names_that_stay_in_a_folder(tmp_path: Path) -> None:
    for name in ("x.jpg", "a/b/x.jpg", "./x.jpg", "..x.jpg", "a..b/x.jpg", "\udcff.jpg"):
        assert below(tmp_path, name) == tmp_path / name


def test_names_in_messages() -> None:
    assert shown(Path("café/ü.jpg")) == "café/ü.jpg"
    assert shown(os.fsdecode(b"caf\xe9.jpg")) == "caf\\xe9.jpg"
    assert shown("a\x1b[31m\n.jpg") == "a\\x1b[31m\\n.jpg"
