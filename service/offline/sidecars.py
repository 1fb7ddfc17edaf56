"""Writes the caption of `image.jpg` to `image.txt` beside it, as training tools for image models expect."""

import contextlib
import errno
import os
from collections.abc import Iterable

from snapcap.service.config.reader import SettingsError
from snapcap.service.offline.failure import Failure, OutputError

# An error with one of these codes repeats for every further image: the disk is full or read-only.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class Sidecars:
    """Writes a text file beside each image. A file is either complete or absent."""

    def __init__(self, *, resume: bool) -> None:
        self._resume = resume

    def holds(self, image: str) -> bool:
        """Tells whether the sidecar exists and is kept. An empty file is no sidecar: a sidecar ends with a
        newline."""
        return self._resume and _size(sidecar(image)) > 0

    def begin(self) -> None:
        pass

    def write(self, image: str, caption: str) -> None:
        """Writes the sidecar of an image. Raises OSError, and OutputError if the disk is full or read-only; the
        sidecar is then unchanged."""
        path = sidecar(image)
        folder, name = os.path.split(path)
        # Hidden; a fixed name, so that killed runs leave one file at most.
        part = os.path.join(folder, f".{name}.part")
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            # "x" creates a new file: it does not follow a link that another user of the folder has put there.
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
    """Returns the path of an image's sidecar: `a/photo.txt` for `a/photo.jpg`."""
    return f"{os.path.splitext(image)[0]}.txt"


def separate_sidecars(images: Iterable[str]) -> tuple[list[str], list[Failure]]:
    """Returns the images that have a sidecar of their own, and the failures of the others: `a.png` would share the
    sidecar of `a.jpg`."""
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
    """Refuses a run that would replace existing sidecars: a person may have written them.

    Raises:
        SettingsError: an image has a sidecar.
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
