"""Writes each caption as `image.txt` beside `image.jpg`, the form that trainers of image models read."""

import contextlib
import errno
import os
from collections.abc import Iterable

from snapcap.service.config.reader import SettingsError
from snapcap.service.offline.failure import Failure, OutputError

# What fails for one image fails for all that follow.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class Sidecars:
    """A text file beside each image, which is there whole or not at all."""

    def __init__(self, *, resume: bool) -> None:
        self._resume = resume

    def holds(self, image: str) -> bool:
        """Tells whether a sidecar exists and stays. An empty file is none, as a sidecar ends with a newline."""
        return self._resume and _size(sidecar(image)) > 0

    def begin(self) -> None:
        pass

    def write(self, image: str, caption: str) -> None:
        """Raises OSError, and OutputError on a disk that is full; then the sidecar is not there, or as it was."""
        path = sidecar(image)
        folder, name = os.path.split(path)
        part = os.path.join(folder, f".{name}.part")  # hidden, and the same each time: a killed run leaves one
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            # A new file, and nothing else that somebody who may write to the folder has put there.
            with open(part, "x", encoding="utf-8", newline="\n") as file:
                file.write(f"{caption}\n")
            os.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(part)
            if error.errno in _NO_ROOM:
                raise OutputError(f"{path} cannot be written: {error.strerror}") from error
            raise

    def close(self) -> None:
        pass


def sidecar(image: str) -> str:
    """`a/photo.txt` of `a/photo.jpg`."""
    return f"{os.path.splitext(image)[0]}.txt"


def separate_sidecars(images: Iterable[str]) -> tuple[list[str], list[Failure]]:
    """The images, but for those whose sidecar would be that of an image before them, as of `a.jpg` and `a.png`."""
    owners: dict[str, str] = {}
    kept, failures = [], []
    for image in images:
        path = sidecar(image)
        owner = owners.setdefault(os.path.abspath(path), image)
        if path == image:
            failures.append(Failure(image, "it has the name of its own sidecar; rename it"))
        elif owner is image:
            kept.append(image)
        else:
            failures.append(Failure(image, f"its sidecar {os.path.basename(path)} is that of {owner}; rename one"))
    return kept, failures


def refuse_existing(images: Iterable[str]) -> None:
    """Captions that a person may have written are replaced only when that is asked for.

    Raises:
        SettingsError: a sidecar is there.
    """
    existing = [path for path in map(sidecar, images) if _size(path) > 0]
    if existing:
        count = "1 sidecar is" if len(existing) == 1 else f"{len(existing)} sidecars are"
        raise SettingsError(f"{count} there ({existing[0]}): --resume keeps what is there, --overwrite replaces it")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
