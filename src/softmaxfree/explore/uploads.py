"""Images that others have sent: read with care, or refused in one sentence."""

from pathlib import Path

from PIL import Image, ImageOps

from ..errors import UserError

MOST_BYTES = 10 * 2**20
"""Of a file: 10 MB."""

MOST_PIXELS = 40_000_000
"""By the file's header, before anything is decoded; 120 MB in memory."""

MOST_RATIO = 20
"""Of the longer side to the shorter one. The shorter one is resized to what a model takes, and the
longer one grows with it."""

LONGEST_SIDE = 2048
"""Larger images are reduced to it."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow reads more, some of them by other programs."""

_NAME = 60
"""Letters of a file's name in a message."""


def read_upload(path: Path) -> Image.Image:
    """A file's image in RGB, upright, its longer side at most `LONGEST_SIDE`.

    Raises:
        ValueError: With a sentence for whoever has sent it.
    """
    name = path.name if len(path.name) <= _NAME else f"{path.name[: _NAME - 3]}..."
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise UserError(
            f"{name} has {size / 2**20:.1f} MB, and files may have {MOST_BYTES // 2**20} MB: send "
            "a smaller one"
        )
    try:
        file = Image.open(path, formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UserError(_too_many_pixels(name, "far more")) from None
    except Exception as error:  # whatever the readers of headers raise
        known = ", ".join(FORMATS)
        raise UserError(f"{name} is no image that can be read: send one of {known}") from error
    with file:
        width, height = file.size
        if width * height > MOST_PIXELS:
            raise UserError(_too_many_pixels(name, f"{width:,} x {height:,}"))
        if max(width, height) > MOST_RATIO * min(width, height):
            raise UserError(
                f"{name} has {width:,} x {height:,} pixels, and one side may be {MOST_RATIO} times "
                "the other: cut it"
            )
        try:
            return _decoded(file)
        except Exception as error:  # whatever a broken file makes the decoders raise
            raise UserError(
                f"{name} begins as an image of the format {file.format} and cannot be decoded: it "
                "is truncated or broken, send it again"
            ) from error


def _decoded(file: Image.Image) -> Image.Image:
    file.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))  # JPEG is decoded at a fraction of its size
    file.load()
    image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I;16"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    image = image.convert("RGB")
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.BICUBIC)
    return image


def _too_many_pixels(name: str, count: str) -> str:
    return (
        f"{name} has {count} pixels by its header, and images may have "
        f"{MOST_PIXELS / 1e6:.0f} million: send a smaller one"
    )
