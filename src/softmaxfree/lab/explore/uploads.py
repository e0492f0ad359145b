"""Images that others have sent: read with care, or refused in one sentence."""

from collections.abc import Callable, Container, Iterable
from pathlib import Path
from threading import Lock

from PIL import Image

from ...data.image_files import ImageFileError, Limits, load_image
from ...data.paths import shown
from ...errors import UserError
from .looks import Kept, Photo

LIMITS = Limits(
    pixels=40_000_000,
    ratio=20,
    bytes=10 * 2**20,
    longest=2048,
    formats=("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"),
)
"""Narrower than those for files of the user's own."""

MOST_BYTES = 500_000_000
"""In memory, of all images that are kept."""

_NAME = 60
"""Letters of a file's name in a message."""


class EndedError(UserError):
    """What a visitor has chosen is no longer known."""


class Photos:
    """What visitors look at: the examples, and images that were sent, the latest of them.

    A session remembers a key alone, so that there may be many.
    """

    def __init__(self, examples: Iterable[Photo], most_bytes: int = MOST_BYTES) -> None:
        self._examples = {photo.digest: photo for photo in examples}
        self._sent: Kept[Photo] = Kept(most_bytes)

    def keep(self, photo: Photo) -> str:
        """The key of an image that was sent."""
        self._sent.put(photo.digest, photo, 4 * photo.image.width * photo.image.height)
        return photo.digest

    def get(self, key: str | None) -> Photo:
        """The image of a key. A session that has ended, and begun anew unasked, has none."""
        if key is None:
            raise EndedError("Your session has ended: choose or upload an image to go on")
        found = self._examples.get(key) or self._sent.get(key)
        if found is None:
            raise EndedError(
                "Your image is no longer kept, since others have sent theirs: upload it again"
            )
        return found


class Inbox:
    """Files that came by the page's upload, each of them to be read once.

    Their names cannot be guessed, so that each is known to whoever has sent it alone. Other files
    of the page, such as the pictures of examples, are neither read nor removed.

    Args:
        files: The server's, of all that have come.
        kept: The page's own, which it shows to everybody.
    """

    def __init__(self, files: set[str], kept: Callable[[], Container[str]]) -> None:
        self._files, self._kept, self._lock = files, kept, Lock()

    def take(self, path: str) -> Image.Image:
        """The image of a file, which is then removed."""
        with self._lock:
            if path not in self._files:
                raise UserError("this file was not sent by you, or was read before: send it")
            self._files.discard(path)
        try:
            return read_upload(Path(path))
        finally:
            if path not in self._kept():  # somebody may send what the page shows
                Path(path).unlink(missing_ok=True)


def read_upload(path: Path) -> Image.Image:
    """A file's image in RGB, upright, within the limits.

    Raises:
        ImageFileError: With a sentence for whoever has sent it.
    """
    try:
        return load_image(path, LIMITS)
    except ImageFileError as error:
        name = shown(path.name)
        name = name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."
        raise ImageFileError(f"{name} cannot be read as an image: {error}") from error
