"""Images in files, read one way everywhere: in predictions, data sets, figures and the page."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from PIL import Image

from ..errors import UserError
from .paths import open_file, shown

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Pillow reads more, some of them by other programs. It tries them in this order, and the last one
is not in all of its versions."""

LARGEST_SIZE = 4096
"""Pixels of a side that images may be resized to."""

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
"""What makes an image upright, by the orientation in its EXIF; from 5 on its sides are swapped."""

Size = tuple[int, int]
"""Width and height, as Pillow has them."""


class ImageFileError(UserError):
    """A file that cannot be read as an image, and why."""


class Limits(NamedTuple):
    """What is read; the rest is refused by its header, before anything is decoded."""

    pixels: int = 100_000_000
    """4 bytes each in memory, once as they are decoded and once as they are given."""
    ratio: int = 100
    """Of the longer side to the shorter one. The shorter one is resized to what a model takes, and
    the longer one grows with it."""
    bytes: int | None = None
    """Of the file."""
    longest: int | None = None
    """Larger images are reduced to this length of their longer side."""
    formats: tuple[str, ...] = FORMATS


OWN = Limits()
"""For files of the user's own."""


def read_image(path: Path, limits: Limits = OWN) -> Image.Image:
    """A file's image in RGB, upright; what is wrong with it is said in one sentence."""
    try:
        return load_image(path, limits)
    except ImageFileError as error:
        raise ImageFileError(f"{shown(path)} cannot be read as an image: {error}") from error


def load_image(
    source: Path | IO[bytes], limits: Limits = OWN, annotated: Size | None = None
) -> Image.Image:
    """An image in RGB, upright, with nothing but its pixels.

    16 bits a channel become 8 by leaving out the lower ones. Floating-point numbers may be from 0
    to 1 or from 0 to 255, and whole numbers of 32 bits from 0 to 255 or to 65,535: the smallest of
    these ranges that holds all of them counts. Transparency is left out, as timm does.

    Args:
        annotated: The size for which there are annotations. An image that has it as it lies in the
            file, but not upright, is left as it lies.

    Raises:
        ImageFileError: A reason, without the file's name.
    """
    with _opened(source, limits) as file:
        try:
            if limits.longest:
                file.draft("RGB", (limits.longest, limits.longest))  # a fraction of a JPEG's size
            file.load()
            return _finished(file, annotated, limits.longest)
        except ImageFileError:
            raise
        except Exception as error:  # whatever a broken file makes the decoders raise
            raise ImageFileError(
                f"it begins as {file.format} and cannot be decoded, for it is truncated or broken"
            ) from error


def upright_rgb(image: Image.Image) -> Image.Image:
    """An image that others have opened, as `load_image` gives it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image.load()
        return _finished(image)


def load_numbers(path: Path) -> Image.Image:
    """An image as it is in the file, such as one whose pixels are classes."""
    with _opened(path, OWN) as file:
        try:
            file.load()
        except Exception as error:  # whatever a broken file makes the decoders raise
            raise ImageFileError("it is truncated or broken") from error
        return file


def sizes(path: Path) -> set[Size]:
    """The size of an image as it lies in the file, and upright. Only the header is read, but of a
    PNG, whose orientation may come last."""
    with _opened(path, OWN) as file:
        lying = file.size
        turned = file.format != "TIFF" and _orientation(file) >= 5  # Pillow turns those itself
        return {lying, lying[::-1]} if turned else {lying}


def header_size(path: Path) -> Size:
    """The size of an image as it lies in the file."""
    with _opened(path, OWN) as file:
        return file.size


def check_size(size: int | Iterable[int] | None, option: str = "--size") -> None:
    """Raises UserError for a side of images that has no pixels or would fill the memory."""
    for side in size if isinstance(size, Iterable) else [size]:
        if side is not None and not 1 <= side <= LARGEST_SIZE:
            raise UserError(f"{option} must be from 1 to {LARGEST_SIZE} pixels, got {side}")


def check_resized(image: Image.Image, side: int) -> None:
    """Refuses an image that is too long for memory once its shorter side has this length."""
    longer = max(image.size) * side // min(image.size)
    if side * longer > OWN.pixels:
        raise UserError(
            f"an image of {image.width:,} x {image.height:,} pixels has {side:,} x {longer:,} when "
            f"it is resized, and {OWN.pixels // 10**6} million are the most: cut it, or give a "
            "smaller --size"
        )


@contextmanager
def _opened(source: Path | IO[bytes], limits: Limits) -> Iterator[Image.Image]:
    """Pillow's image of a file whose header is within the limits, and which is not decoded yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of many pixels, odd EXIF, transparent palettes
        with _stream(source, limits) as stream:
            try:
                file = Image.open(stream, formats=limits.formats)
            except Image.DecompressionBombError:
                raise ImageFileError(_too_many("far more", limits)) from None
            except Exception as error:  # whatever the readers of headers raise
                known = ", ".join(limits.formats)
                raise ImageFileError(f"it is none of {known}, or broken") from error
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
        raise ImageFileError("there is none") from error
    except UserError as error:
        raise ImageFileError("it is a folder, a pipe or a device, not a file") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero in it
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
    """An image that has been decoded, upright, in RGB, without what else the file says."""
    orientation = _orientation(image)
    turn = _TURNS.get(orientation)
    lying = orientation >= 5 and image.size == annotated and image.width != image.height
    if turn is not None and not lying:
        image = image.transpose(turn)
    image = _eight_bits(image)
    if image.mode != "RGB" or turn is None or lying:
        image = image.convert("RGB")  # a copy if it is in RGB
    if longest:
        image.thumbnail((longest, longest), Image.Resampling.BICUBIC)
    image.info = {}  # else pictures drawn from it would be turned again, and say where it was taken
    return image


def _orientation(image: Image.Image) -> int:
    """1 to 8 by the image's EXIF; 1, which is upright, where it says nothing that is known."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # whatever broken EXIF makes Pillow raise
        return 1
    return found if found in _TURNS else 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """An image in grey of more bits in a mode that Pillow converts without clipping."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode not in ("I", "F"):
        return image
    values = np.asarray(image)
    low, high = values.min(), values.max()
    most = 255 if image.mode == "F" else 65_535
    if not (low >= 0 and high <= most):  # NaN is neither
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
