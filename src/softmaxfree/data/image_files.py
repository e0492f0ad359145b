"""Image files, read in the same way by data sets, predictions, figures and the explorer."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from PIL import Image

from ..errors import UserError
from .paths import open_file, shown

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Tried in this order. Pillow reads more formats, some through other programs; not every version
has the last one."""

SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2",
    ".avif",
)  # fmt: skip
"""What the names of images in folders end in, in either case."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns an image upright, by EXIF orientation; 5 to 8 swap its sides."""

Size = tuple[int, int]
"""Width and height, as in Pillow."""


class ImageFileError(UserError):
    """Why a file cannot be read as an image."""


class Limits(NamedTuple):
    """Limits on images, checked in the header before anything is decoded."""

    pixels: int = 100_000_000
    """Each takes 4 bytes, twice: in the decoder and in the result."""
    ratio: int = 100
    """Of the longer side to the shorter one: a model resizes the shorter side, and the longer one
    grows with it."""
    bytes: int | None = None
    """Size of the file."""
    longest: int | None = None
    """Length of the longer side to which larger images are reduced."""
    formats: tuple[str, ...] = FORMATS


OWN = Limits()
"""Limits for the user's own files."""


def read_image(path: Path, limits: Limits = OWN) -> Image.Image:
    """The upright RGB image in a file; raises ImageFileError with one sentence."""
    try:
        return load_image(path, limits)
    except ImageFileError as error:
        raise ImageFileError(f"{shown(path)} cannot be read as an image: {error}") from error


def load_image(
    source: Path | IO[bytes], limits: Limits = OWN, annotated: Size | None = None
) -> Image.Image:
    """The upright RGB image in a file, without metadata.

    Of 16 bits in a channel, the lower 8 are dropped. Floating-point values may be from 0 to 1 or
    from 0 to 255, and 32-bit integers from 0 to 255 or to 65,535; the smallest range that holds all
    values is used. Transparency is dropped, as timm does.

    Args:
        annotated: Size in the annotations. An image that has this size as stored, but not upright,
            is not turned.

    Raises:
        ImageFileError: With a reason, without the file's name.
    """
    with _opened(source, limits) as file:
        try:
            if limits.longest:
                file.draft(
                    "RGB", (limits.longest, limits.longest)
                )  # decodes a JPEG at a fraction of its size
            file.load()
            return _finished(file, annotated, limits.longest)
        except ImageFileError:
            raise
        except Exception as error:  # decoders raise anything on a broken file
            raise ImageFileError(
                f"it begins as {file.format} and cannot be decoded, for it is truncated or broken"
            ) from error


def upright_rgb(image: Image.Image) -> Image.Image:
    """Converts an opened image to what `load_image` returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image.load()
        return _finished(image)


def load_numbers(path: Path) -> Image.Image:
    """An image as stored, for example one whose pixels are classes."""
    with _opened(path, OWN) as file:
        try:
            file.load()
        except Exception as error:  # decoders raise anything on a broken file
            raise ImageFileError("it is truncated or broken") from error
        return file


def sizes(path: Path) -> set[Size]:
    """The sizes of an image as stored and upright.

    Reads only the header, except of a PNG, whose orientation may come last.
    """
    with _opened(path, OWN) as file:
        lying = file.size
        turned = file.format != "TIFF" and _orientation(file) >= 5  # Pillow turns TIFFs itself
        return {lying, lying[::-1]} if turned else {lying}


def header_size(path: Path) -> Size:
    """The size of an image as stored."""
    with _opened(path, OWN) as file:
        return file.size


def check_resized(image: Image.Image, side: int) -> None:
    """Raises UserError if an image is too large for memory after resizing its shorter side."""
    longer = max(image.size) * side // min(image.size)
    if side * longer > OWN.pixels:
        raise UserError(
            f"an image of {image.width:,} x {image.height:,} pixels has {side:,} x {longer:,} when "
            f"it is resized, and {OWN.pixels // 10**6} million are the most: cut it, or give a "
            "smaller --size"
        )


@contextmanager
def _opened(source: Path | IO[bytes], limits: Limits) -> Iterator[Image.Image]:
    """Opens an image whose header is within the limits, without decoding it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about many pixels, odd EXIF, transparent palettes
        with _stream(source, limits) as stream:
            try:
                file = Image.open(stream, formats=limits.formats)
            except Image.DecompressionBombError:
                raise ImageFileError(_too_many("far more", limits)) from None
            except Exception as error:  # readers of headers raise anything
                known = ", ".join(limits.formats)
                raise ImageFileError(
                    f"it does not begin as {known} files do: it is something else, or damaged"
                ) from error
            with file:
                _check_header(file, limits)
                yield file


def _stream(source: Path | IO[bytes], limits: Limits) -> nullcontext[IO[bytes]] | IO[bytes]:
    if not isinstance(source, Path):
        return nullcontext(source)
    try:
        if limits.bytes is not None and (size := source.stat().st_size) > limits.bytes:
            raise ImageFileError(
                f"it has {size / 2**20:.1f} MB, and files may have {limits.bytes >> 20} MB"
            )
        return open_file(source)
    except ImageFileError:
        raise
    except FileNotFoundError as error:
        raise ImageFileError("there is no such file") from error
    except UserError as error:
        raise ImageFileError("it is a folder, a pipe or a device, not a file") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise ImageFileError(getattr(error, "strerror", None) or str(error)) from error


def _check_header(file: Image.Image, limits: Limits) -> None:
    width, height = file.size
    if not width or not height:
        raise ImageFileError("it has no pixels")
    if width * height > limits.pixels:
        raise ImageFileError(_too_many(f"{width:,} x {height:,}", limits))
    if max(width, height) > limits.ratio * min(width, height):
        raise ImageFileError(
            f"it has {width:,} x {height:,} pixels, and one side may be {limits.ratio} times the "
            "other: cut it"
        )


def _too_many(count: str, limits: Limits) -> str:
    return (
        f"it has {count} pixels by its header, and images may have "
        f"{limits.pixels // 10**6} million: make it smaller"
    )


def _finished(
    image: Image.Image, annotated: Size | None = None, longest: int | None = None
) -> Image.Image:
    """Converts a decoded image to upright RGB without metadata."""
    orientation = _orientation(image)
    turn = _TURNS.get(orientation)
    lying = orientation >= 5 and image.size == annotated and image.width != image.height
    if turn is not None and not lying:
        image = image.transpose(turn)
    image = _eight_bits(image)
    if image.mode != "RGB" or turn is None or lying:
        image = image.convert("RGB")  # copies an RGB image
    if longest:
        image.thumbnail((longest, longest), Image.Resampling.BICUBIC)
    image.info = {}  # EXIF would turn drawn pictures again, and reveal places
    return image


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 (upright) if missing or unknown."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # Pillow raises anything on broken EXIF
        return 1
    return found if found in _TURNS else 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Converts a grey image of more than 8 bits to 8, which Pillow would clip."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode not in ("I", "F"):
        return image
    values = np.asarray(image)
    low, high = values.min(), values.max()
    most = 255 if image.mode == "F" else 65_535
    if not (low >= 0 and high <= most):  # false for NaN
        raise ImageFileError(
            f"its pixels are from {low:.6g} to {high:.6g}, and may be from 0 to "
            f"{'1 or to 255' if image.mode == 'F' else '255 or to 65,535'}: save it with 8 bits a "
            "channel"
        )
    if image.mode == "F":
        scaled = np.rint(values * 255 if high <= 1 else values)
    else:
        scaled = values >> 8 if high > 255 else values
    return Image.fromarray(scaled.astype(np.uint8))
