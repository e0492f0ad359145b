"""Images that visitors send: read with care, or refused in one sentence."""

from collections.abc import Callable, Container, Iterable
from pathlib import Path
from threading import Lock

from cachetools import LRUCache
from PIL import Image

from ...data.image_files import ImageFileError, Limits, load_image
from ...data.paths import shown
from ...errors import UserError
from .looks import Photo

LIMITS = Limits(
    pixels=40_000_000,
    ratio=20,
    bytes=10 * 2**20,
    longest=2048,
    formats=("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"),
)
"""Narrower than the limits for the user's own files."""

MOST_BYTES = 500_000_000
"""Memory for all images that are kept."""

_NAME = 60
"""The most letters of a file's name in a message."""


class EndedError(UserError):
    """The image that a visitor chose is no longer known."""


class Photos:
    """The images that visitors look at: the examples, and the latest uploads.

    A session holds only a key, so that there may be many sessions.
    """

    def __init__(self, examples: Iterable[Photo], most_bytes: int = MOST_BYTES) -> None:
        self._examples = {photo.digest: photo for photo in examples}
        self._sent: LRUCache[str, Photo] = LRUCache(most_bytes, _bytes_of)
        self._lock = Lock()

    def keep(self, photo: Photo) -> str:
        """Keeps an upload, and returns its key."""
        with self._lock:
            self._sent[photo.digest] = photo
        return photo.digest

    def get(self, key: str | None) -> Photo:
        """The image of a key, which is None after a session has ended."""
        if key is None:
            raise EndedError("Your session has ended: choose or upload an image to go on")
        with self._lock:
            found = self._examples.get(key) or self._sent.get(key)
        if found is None:
            raise EndedError(
                "Your image is no longer kept, since others have sent theirs: upload it again"
            )
        return found


def _bytes_of(photo: Photo) -> int:
    return 4 * photo.image.width * photo.image.height


class Inbox:
    """Files that came by the page's upload, each of which is read once.

    A file's name is a digest of its content and of a secret: only those who have sent a file know
    its name. Visitors who send the same file at once share it, so that what was read last is kept.
    Other files of the page, such as the pictures of examples, are neither read nor removed.

    Args:
        files: The server's set of all uploads.
        kept: Returns the page's own files, which everybody sees.
    """

    def __init__(self, files: set[str], kept: Callable[[], Container[str]]) -> None:
        self._files, self._kept, self._lock = files, kept, Lock()
        self._read: LRUCache[str, Image.Image] = LRUCache(10)

    def take(self, path: str) -> Image.Image:
        """Reads the image of a file, and removes the file."""
        with self._lock:
            if path not in self._files:
                if path in self._read:
                    return self._read[path]
                raise UserError("this file was not sent by you, or was read before: send it")
            self._files.discard(path)
            try:
                self._read[path] = read_upload(Path(path))
            finally:
                if path not in self._kept():  # somebody may send what the page shows
                    Path(path).unlink(missing_ok=True)
            return self._read[path]


def read_upload(path: Path) -> Image.Image:
    """A file's image in RGB, upright, within the limits.

    Raises:
        ImageFileError: With a sentence for the sender.
    """
    try:
        return load_image(path, LIMITS)
    except ImageFileError as error:
        name = shown(path.name)
        name = name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."
        raise ImageFileError(f"{name} cannot be read as an image: {error}") from error
