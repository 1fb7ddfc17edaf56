"""Finds the images that the operands of `snapcap caption` name, and defines the failure of an image."""

import glob
import mimetypes
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import field

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image_formats import HEAD_BYTES, TAIL_BYTES, is_readable, kind_of, readable
from snapcap.service.errors import ServiceError
from snapcap.service.offline.arguments import NOT_READ, STDIN, is_url
from snapcap.warmup.machine.files import opened


@dataclass(frozen=True)
class Failure:
    """Names a file, folder or pattern that gets no caption, and the reason. ``is_image``: the path names one image,
    so that an output has a row for it."""

    path: str
    reason: str
    is_image: bool = True


class OutputError(Exception):
    """Ends the run because no further caption can be written. The message is one line for the user."""


def reason_of(error: BaseException) -> str:
    """Returns the message of an error as one line. The message of an OSError comes without the path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = error.detail if isinstance(error, ServiceError) else str(error)
    return " ".join(text.split()) or type(error).__name__


@dataclass
class Found:
    """Holds the files that the operands name. ``images``: in the order of the operands, without duplicates.
    ``failures``: files, folders and patterns that cannot be captioned, with the reason. ``others``: files of
    folders and patterns that are not pictures."""

    images: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def find_images(operands: Iterable[str], recursive: bool, lines: Iterable[bytes]) -> Found:
    """Returns the images that the operands name.

    A file operand is always an image. In a folder or a pattern, a file is an image if its first bytes are those of
    a readable picture format. A file with the name of a picture and other bytes is an image too: captioning it
    fails and reports why. A picture in an unreadable format is a failure, so that no picture is skipped silently.
    Files of a folder are sorted by name. Hidden files and folders in a folder are skipped: macOS leaves copies such
    as `._photo.jpg`. Links to folders inside a folder are not followed. ``lines``: names of files and folders, one
    a line, for the operand `-`."""
    finder = _Finder(recursive)
    for operand in operands:
        if operand == STDIN:
            for line in lines:
                finder.take(os.fsdecode(line.rstrip(b"\r\n")))
        elif glob.has_magic(operand) and not os.path.lexists(operand):
            finder.take_pattern(operand)
        else:
            finder.take(operand)
    return finder.found


class _Finder:
    """Collects the images that operands name, each file once."""

    def __init__(self, recursive: bool) -> None:
        self.found = Found()
        self._recursive = recursive
        self._seen: set[str] = set()
        self._taken = 0  # images found so far, duplicates included

    def take(self, path: str) -> None:
        """Adds a file, or the images of a folder. A path that does not exist is a failure."""
        if not path:  # an empty line of the list on standard input
            return
        if not os.path.isdir(path):
            try:
                os.stat(path)
            except (OSError, ValueError) as error:  # ValueError: the name has a null byte
                if is_url(path):
                    self._fail(path, NOT_READ, is_image=False)
                elif self._is_new(path):
                    self._fail(path, reason_of(error))
            else:
                self._add(path)
            return
        before = self._taken, len(self.found.failures)
        self._scan(path)
        if before == (self._taken, len(self.found.failures)):
            hint = "" if self._recursive else "; --recursive searches its subfolders too"
            self._fail(path, f"no picture in this folder{hint}", is_image=False)

    def take_pattern(self, pattern: str) -> None:
        before = self._taken
        for path in sorted(_matches(pattern)):
            if os.path.isdir(path):
                self._scan(path)
            else:
                self._add_by_bytes(path)
        if before == self._taken:
            self._fail(pattern, "no picture matches", is_image=False)

    def _scan(self, folder: str) -> None:
        folders = []
        try:
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.startswith("."):
                        continue
                    if _is_file(entry):
                        self._add_by_bytes(os.path.join(folder, entry.name))
                    elif self._recursive and entry.is_dir(follow_symlinks=False):
                        folders.append(os.path.join(folder, entry.name))
        except OSError as error:
            self._fail(folder, reason_of(error), is_image=False)
        for each in folders:
            self._scan(each)

    def _add_by_bytes(self, path: str) -> None:
        try:
            kind = kind_of(_ends(path))
        except OSError as error:
            if self._is_new(path):
                self._fail(path, reason_of(error))
            return
        if kind is not None and is_readable(kind.label):
            self._add(path)
        elif kind is not None and kind.picture:
            if self._is_new(path):
                self._fail(path, f"{kind.name} images are not read; convert it to {readable()}")
        elif (mimetypes.guess_type(path)[0] or "").startswith("image/"):
            self._add(path)
        elif self._is_new(path):
            self.found.others.append(path)

    def _add(self, path: str) -> None:
        self._taken += 1
        if self._is_new(path):
            self.found.images.append(path)

    def _is_new(self, path: str) -> bool:
        key = os.path.abspath(path)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _fail(self, path: str, reason: str, *, is_image: bool = True) -> None:
        self.found.failures.append(Failure(path, reason, is_image))


def _matches(pattern: str) -> Iterator[str]:
    """Yields the paths that a pattern matches, as `glob` does, but `**` ends at a link to a folder above the link:
    `glob` would yield a picture again for each of 40 turns, and not end in a folder with two such links."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    rest = parts[at + 1 :] or ["*"]
    start = os.sep.join(parts[:at]) or os.sep
    for top in glob.iglob(start) if at else ("",):
        for folder in _folders(top):
            yield from _matches(os.path.join(glob.escape(folder), *rest))


def _folders(top: str, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """Yields a folder and the folders below it. Hidden folders are left out, and links to a folder in ``above``,
    which has the device and number of each folder on the way."""
    try:
        state = os.stat(top or os.curdir)
        names = sorted(name for name in os.listdir(top or os.curdir) if not name.startswith("."))
    except OSError:
        return
    key = (state.st_dev, state.st_ino)
    if key in above:
        return
    yield top
    for path in (os.path.join(top, name) for name in names):
        if os.path.isdir(path):
            yield from _folders(path, above | {key})


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Returns whether an entry of a folder is a regular file. A link that leads nowhere counts as one: opening it
    fails with the reason."""
    try:
        return stat.S_ISREG(entry.stat().st_mode) if entry.is_symlink() else entry.is_file()
    except OSError:
        return True


def _ends(path: str) -> bytes:
    """Returns the first and last bytes of a file, which identify its format. Opening a named pipe does not
    block."""
    with opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as end:
        head = os.pread(end, HEAD_BYTES, 0)
        size = os.fstat(end).st_size
        return head if size <= len(head) else head + os.pread(end, TAIL_BYTES, size - TAIL_BYTES)
