"""Writes captions as JSON lines, in the format that ImageFolder of `datasets` reads.

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
            raise SettingsError(f"{path} holds captions: --resume goes on after them, --overwrite begins anew")
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
