"""Writes captions as JSON lines, in the form that ImageFolder of `datasets` reads.

{"file_name": "a.jpg", "caption": "a red square"}
"""

import json
import os
import stat
import sys
from typing import Any

from snapcap.service.config.reader import SettingsError
from snapcap.service.offline.arguments import STDOUT
from snapcap.service.offline.failure import OutputError, reason_of


class JsonLines:
    """A file that grows by whole lines, or standard output.

    ``file_name`` is relative to the file's folder where the image is below it, so that both can be moved together;
    else it is absolute. A line is written at once and in one piece; a process that is killed leaves what it had.
    """

    def __init__(self, path: str, *, resume: bool, overwrite: bool) -> None:
        """Opens the file, and reads what it holds when that is to be kept; changes nothing in it yet.

        Raises:
            SettingsError: it cannot be written, or holds captions and neither ``resume`` nor ``overwrite`` is set,
                or a line that is none.
        """
        self._path = path
        self._folder = os.path.abspath("." if path == STDOUT else os.path.dirname(path))
        self._held: set[str] = set()
        self._keep: int | None = None  # bytes of the file that stay; None: it has no length
        self._file = self._open()
        state = os.fstat(self._file)
        if not stat.S_ISREG(state.st_mode) or path == STDOUT:
            return
        if state.st_size and not (resume or overwrite):
            raise SettingsError(f"{path} holds captions: --resume goes on after them, --overwrite begins anew")
        self._keep = self._read() if resume else 0

    def holds(self, image: str) -> bool:
        return os.path.abspath(image) in self._held

    def begin(self) -> None:
        """Cut off what is not to be kept; of a file that is resumed, a line that a crash has left half."""
        if self._keep is not None:
            os.ftruncate(self._file, self._keep)

    def write(self, image: str, caption: str) -> None:
        """Append the line of an image.

        Raises:
            OutputError: it could not be written; the file ends with the line before.
        """
        line = _line(self._name(image), caption)
        written = 0
        try:
            while written < len(line):  # a disk that is full takes a part of a line, and fails at the next
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
        """Take note of the images that have a line; returns the length of all whole lines."""
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
    except UnicodeEncodeError:  # a name whose bytes are not UTF-8; JSON escapes say which
        return f"{json.dumps(value)}\n".encode()
