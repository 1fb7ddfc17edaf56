"""Reads the fields of a checkpoint's JSON files, and refuses a field of the wrong type by its name."""

import json
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import UserError

ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish")
MOST = 2**31 - 1  # greatest dimension: the most that an index of 32 bits holds
_MOST_NUMBER = 1e9  # far above any epsilon, scale or base of positions
MOST_LAYERS = 1024  # layers are listed one by one
POINTER = b"version https://git-lfs"  # beginning of the pointer that Git LFS leaves in place of a large file
IS_POINTER = "it is a Git LFS pointer to the file; run git lfs pull"
_MOST_SHOWN = 200  # characters of a value, which can be as long as its file


class ConfigError(UserError, ValueError):
    """A configuration that cannot be served. The message is one line that names the field and its value."""

    def __init__(self, field: str, value: object, why: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
        super().__init__(f"unsupported {field} = {shown}: {why}")
        self.field = field


class FileError(ConfigError):
    """A file of a checkpoint that the system does not allow to be read, or that is damaged. The message is one line
    with file and reason."""

    def __init__(self, path: Path, error: OSError | str) -> None:
        reason = error if isinstance(error, str) else error.strerror or error
        UserError.__init__(self, f"{path} cannot be read: {reason}")
        self.field = path.name


def is_there(path: Path) -> bool:
    """Returns whether a regular file has this name.

    Some versions of Python return False from ``Path.is_file`` if the folder may not be searched. Raises FileError
    if the system does not allow the look-up, or if the name is a link to a file that does not exist, as in a copy
    of a folder of the hub's cache, or a folder, which Docker makes for a mount of a file that does not exist."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise FileError(path, "it is a folder; put the file in its place, or remove it")
        return stat.S_ISREG(mode)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            reason = f"it is a link to {path.readlink()}, which does not exist; copy what it links to"
            raise FileError(path, reason) from None
        return False
    except OSError as error:
        raise FileError(path, error) from error


def read_bytes(path: Path, most: int = -1) -> bytes:
    """Returns the content of a file, or its first ``most`` bytes.

    Raises:
        FileError: the file exists and cannot be read, or is a pointer to the file.
        FileNotFoundError: the file does not exist.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileError(path, error) from error
    if content.startswith(POINTER):
        raise FileError(path, IS_POINTER)
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object from a file. Errors name the file.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
        FileNotFoundError: the file does not exist.
    """
    content = read_bytes(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileError(path, f"not valid JSON ({error}); download or copy it again") from None
    if not isinstance(value, dict):
        raise ConfigError(path.name, type(value).__name__, "a JSON object is expected")
    return value


def json_or_empty(path: Path) -> dict[str, Any]:
    """Returns ``read_json``, or ``{}`` if the file does not exist."""
    return read_json(path) if is_there(path) else {}


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)  # JSON's true is an int in Python


@dataclass(frozen=True)
class Fields:
    """An object in a ``config.json``. Its ``prefix``, such as ``encoder.``, goes before a field's name in errors.

    A missing field has the ``default`` that the caller gives, which is transformers'.
    """

    values: Mapping[str, Any]
    prefix: str = ""

    def error(self, field: str, value: object, why: str) -> ConfigError:
        return ConfigError(self.prefix + field, value, why)

    def section(self, field: str) -> "Fields":
        """Returns an object inside this one."""
        value = self.values.get(field)
        if not isinstance(value, dict):
            raise self.error(field, value, "config.json must hold this object")
        return Fields(value, f"{self.prefix}{field}.")

    def require(self, field: str, expected: object, why: str = "", default: object = None) -> None:
        """Refuses any other value than ``expected``. A null counts as the default."""
        value = self.values.get(field)
        value = default if value is None else value
        if value != expected:
            raise self.error(field, value, why or f"only {expected!r} is supported")

    def architecture(self, *served: str) -> None:
        """Refuses a checkpoint that names its classes without one of ``served``."""
        names = self.values.get("architectures")
        if names not in (None, []) and not (isinstance(names, list) and any(name in served for name in names)):
            raise self.error("architectures", names, f"only {' and '.join(served)} can be served")

    def whole(self, field: str, default: int | None = None, least: int = 0, most: int = MOST) -> int:
        value = self.values.get(field, default)
        if not is_whole(value) or not least <= value <= most:
            raise self.error(field, value, f"a whole number from {least} to {most} is expected")
        return int(value)

    def positive_int(self, field: str, default: int | None = None) -> int:
        return self.whole(field, default, least=1)

    def layers(self, field: str, default: int) -> int:
        return self.whole(field, default, least=1, most=MOST_LAYERS)

    def whole_numbers(
        self, field: str, default: Sequence[int], least: int = 0, most: int = MOST
    ) -> tuple[int, ...]:
        """Returns the numbers of a list. An error names the number's place in the list."""
        values = self.values.get(field, [*default])
        if not isinstance(values, list):
            raise self.error(field, values, "a list of whole numbers is expected")
        numbers = Fields({f"{field}[{place}]": value for place, value in enumerate(values)}, self.prefix)
        return tuple(numbers.whole(each, least=least, most=most) for each in numbers.values)

    def number(self, field: str, default: float | None = None) -> float:
        value = self.values.get(field, default)
        if not (is_whole(value) or isinstance(value, float)) or not abs(value) <= _MOST_NUMBER:
            raise self.error(field, value, "a number is expected")
        return float(value)

    def positive_number(self, field: str, default: float | None = None) -> float:
        value = self.number(field, default)
        if value <= 0:
            raise self.error(field, self.values.get(field, default), "a positive number is expected")
        return value

    def switch(self, field: str, default: bool) -> bool:
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, value, "true or false is expected")
        return value

    def size_pair(self, field: str, default: int) -> tuple[int, int]:
        """Returns a size as (height, width), in pixels."""
        value = self.values.get(field, default)
        pair = tuple(value) if isinstance(value, list) else (value, value)
        if len(pair) != 2 or not all(is_whole(side) and 0 < side <= MOST for side in pair):
            raise self.error(field, value, "a size in pixels, or [height, width], is expected")
        return pair[0], pair[1]

    def one_of(self, field: str, known: Collection[str], default: str | None = None) -> str:
        value = self.values.get(field, default)
        if value not in tuple(known):
            raise self.error(field, value, f"supported are {', '.join(known)}")
        return str(value)

    def activation(self, field: str, default: str) -> str:
        return self.one_of(field, ACTIVATIONS, default)

    def heads(self, field: str, default: int, width: int, width_field: str = "hidden_size") -> int:
        """Returns a number of attention heads, which must divide the width."""
        heads = self.positive_int(field, default)
        if width % heads:
            raise self.error(field, heads, f"{width_field} {width} is not divisible by it")
        return heads

    def token(self, field: str, vocab_size: int, default: int | None = None) -> int:
        """Returns a token id, which must be given if there is no default."""
        value = self.values.get(field, default)
        if not is_whole(value) or not 0 <= value < vocab_size:
            raise self.error(field, value, f"a token id below vocab_size {vocab_size} is expected")
        return value
