"""Writes captions to the outputs of a job: printed lines, a file of JSON lines, sidecars.

JSON lines have the format that ImageFolder of `datasets` reads: {"file_name": "a.jpg", "caption": "a red square"}.
The sidecar of `image.jpg` is `image.txt` beside it, as training tools for image models expect.
"""

import contextlib
import errno
import io
import json
import os
import stat
import sys
from collections.abc import Iterable
from typing import Any, Protocol

from snapcap.service.config.reader import SettingsError
from snapcap.service.offline.arguments import STDOUT, Job
from snapcap.service.offline.discovery import Failure, Found, OutputError, reason_of

# An error with one of these codes repeats for every further image: the disk is full or read-only.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class Output(Protocol):
    """Takes captions in the order of the images."""

    def holds(self, image: str) -> bool:
        """Tells whether the output has the caption of an image already and keeps it."""

    def begin(self) -> None:
        """Prepares the output. Called once, before the first caption."""

    def write(self, image: str, caption: str) -> None:
        """Writes a caption. Raises OSError if this caption cannot be written, OutputError if no caption can be."""

    def close(self) -> None: ...


class PrintedLines:
    """Prints ``path<TAB>caption`` lines on standard output."""

    def holds(self, image: str) -> bool:
        return False

    def begin(self) -> None:
        # Bytes of a file name that are not valid text are printed unchanged.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape", line_buffering=True)

    def write(self, image: str, caption: str) -> None:
        try:
            print(f"{image}\t{' '.join(caption.splitlines())}")
        except OSError as error:  # the reader of the pipe has closed it, as `head` does
            # The end of the process flushes the buffer: redirected to /dev/null, the flush does not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise OutputError(f"captions cannot be printed: {reason_of(error)}") from error

    def close(self) -> None:
        pass


class Outputs:
    """Writes all outputs of a job, and finds the images that an output lacks."""

    def __init__(self, job: Job, found: Found) -> None:
        """Raises SettingsError if captions exist and the job neither resumes nor overwrites."""
        self._outputs: list[Output] = []
        images = found.images
        if job.sidecar:
            images, failures = separate_sidecars(images)
            found.failures.extend(failures)
            if not (job.resume or job.overwrite):
                refuse_existing(images)
            self._outputs.append(Sidecars(resume=job.resume))
        if job.output is not None:
            self._outputs.append(JsonLines(job.output, resume=job.resume, overwrite=job.overwrite))
        if not self._outputs:
            self._outputs.append(PrintedLines())
        self.todo = [image for image in images if not all(output.holds(image) for output in self._outputs)]
        self.held = len(images) - len(self.todo)

    def begin(self) -> None:
        for output in self._outputs:
            output.begin()

    def write(self, image: str, caption: str) -> None:
        """Writes a caption to each output that has none of this image. Raises OSError, OutputError."""
        for output in self._outputs:
            if not output.holds(image):
                output.write(image, caption)

    def close(self) -> None:
        for output in self._outputs:
            output.close()


class JsonLines:
    """Appends whole lines to a file or to standard output.

    ``file_name`` is relative to the output file's folder if the image is below that folder, so that both can be
    moved together; otherwise it is absolute. Lines are not buffered: a killed process leaves all lines written so
    far.
    """

    def __init__(self, path: str, *, resume: bool, overwrite: bool) -> None:
        """Opens the file without changing its content. With ``resume``, reads the lines that it has.

        Raises:
            SettingsError: the file cannot be written; it has content and neither ``resume`` nor ``overwrite`` is
                set; or a line is not a caption.
        """
        self._path = path
        self._folder = os.path.abspath("." if path == STDOUT else os.path.dirname(path))
        self._held: set[str] = set()
        self._keep: int | None = None  # length of the file without a partial line; None: not a regular file
        self._file = self._open()
        state = os.fstat(self._file)
        if not stat.S_ISREG(state.st_mode) or path == STDOUT:
            return
        if state.st_size and not (resume or overwrite):
            raise SettingsError(
                f"{path} has captions: --resume keeps them and adds the others, --overwrite replaces them"
            )
        self._keep = self._read() if resume else 0

    def holds(self, image: str) -> bool:
        return os.path.abspath(image) in self._held

    def begin(self) -> None:
        """Truncates the file: to nothing, or, if it is resumed, by a partial line that a crash left at its end."""
        if self._keep is not None:
            os.ftruncate(self._file, self._keep)

    def write(self, image: str, caption: str) -> None:
        """Appends the line of an image.

        Raises:
            OutputError: the line could not be written. A regular file then ends with the line before.
        """
        line = _line(self._name(image), caption)
        written = 0
        try:
            while written < len(line):  # a full disk may take a part of the line and fail at the next write
                written += os.write(self._file, line[written:])
        except OSError as error:
            if self._keep is not None:
                os.ftruncate(self._file, self._keep)
            raise OutputError(f"--output {self._path} cannot be written: {reason_of(error)}") from error
        if self._keep is not None:
            self._keep += len(line)

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        if self._path == STDOUT:
            return os.dup(sys.stdout.fileno())
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise SettingsError(f"--output {self._path} cannot be written: {error.strerror}") from None

    def _read(self) -> int:
        """Notes the images that have a line. Returns the length in bytes of all whole lines."""
        length = 0
        with open(self._path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                self._held.add(os.path.normpath(os.path.join(self._folder, self._file_name(number, line))))
                length += len(line)
        return length

    def _file_name(self, number: int, line: bytes) -> str:
        try:
            value: Any = json.loads(line)
            name: str = os.fspath(value["file_name"])
            return name
        except (ValueError, KeyError, TypeError):
            raise SettingsError(
                f"{self._path} line {number} is not a caption; give another --output, or --overwrite it"
            ) from None

    def _name(self, image: str) -> str:
        path = os.path.abspath(image)
        inside = os.path.join(self._folder, "")
        return path.removeprefix(inside)


def _line(name: str, caption: str) -> bytes:
    value = {"file_name": name, "caption": caption}
    try:
        return f"{json.dumps(value, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # a file name that is not UTF-8; JSON escapes keep its bytes
        return f"{json.dumps(value)}\n".encode()


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
            failures.append(Failure(image, "the image has the name of its own sidecar; rename the image"))
        elif owner is image:
            kept.append(image)
        else:
            failures.append(
                Failure(
                    image, f"the sidecar {os.path.basename(path)} belongs to {owner}; rename one of the two images"
                )
            )
    return kept, failures


def refuse_existing(images: Iterable[str]) -> None:
    """Refuses a run that would replace existing sidecars: a person may have written them.

    Raises:
        SettingsError: an image has a sidecar.
    """
    existing = [path for path in map(sidecar, images) if _size(path) > 0]
    if existing:
        count = "1 sidecar exists" if len(existing) == 1 else f"{len(existing)} sidecars exist"
        raise SettingsError(f"{count} ({existing[0]}): --resume keeps existing captions, --overwrite replaces them")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
