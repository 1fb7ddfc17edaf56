"""Defines a configuration option: a dataclass field whose metadata says how to read, validate and describe it.

`parse_*` functions turn the text of a command-line argument or an environment variable into a value; they raise
ValueError with the end of the sentence "X must …".
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

_KEY = "option"
_SIZES = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]{0,31})://([a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # browsers leave these ports out of an origin
NAME = "[A-Za-z0-9][A-Za-z0-9._@:/-]{0,199}"
_ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")
_LONGEST_ROOT_PATH = 256
# Names of values in the help, by the name of the function that parses them or makes their parser.
_METAVARS = {
    "parse_int": "N",
    "parse_seconds": "SECONDS",
    "parse_size": "SIZE",
    "parse_path": "FILE",
    "parse_name": "NAME",
    "parse_names": "NAME",
}
_LONGEST_S = 1e9  # longer than any sensible timeout, and short enough for the system to wait for
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Option(NamedTuple):  # made in a seventh of a dataclass's time, which a server's bind waits for
    """Describes an option. `name`: in snake_case, for `--some-name` and `SNAPCAP_SOME_NAME`. `default_text`: the
    default in the help. `repeatable`: the texts of several uses are joined by commas."""

    name: str
    help: str
    parse: Callable[[str], Any]
    metavar: str
    default_text: str
    choices: tuple[str, ...] = ()
    repeatable: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "SNAPCAP_" + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.parse is parse_switch


def option(
    default: Any,
    help: str,  # noqa: A002 - the word argparse uses
    *,
    name: str = "",
    parse: Callable[[str], Any] = str,
    metavar: str = "",
    default_text: str | None = None,
    choices: tuple[str, ...] = (),
    repeatable: bool = False,
) -> Any:
    """Returns a dataclass field for an option. `default` may be a function, called for each new instance. Without
    `name`, the option has the field's. Without `metavar`, the parser names the value. Without `default_text`, the
    help shows the default, "on" or "off" for a switch, or "none"."""
    if choices:
        parse, metavar = parse_choice(choices), "{" + ",".join(choices) + "}"
    metavar = metavar or _METAVARS.get(parse.__qualname__.partition(".")[0], "TEXT")
    shown = "none" if default in (None, (), "") else str(default)
    text = default_text or {"True": "on", "False": "off"}.get(shown, shown)
    metadata = {_KEY: Option(name, help, parse, metavar, text, choices, repeatable)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def options_of(group: type[Any]) -> dict[str, Option]:
    """Returns the options of a dataclass by field name, in order."""
    options = {field.name: field.metadata[_KEY] for field in dataclasses.fields(group)}
    return {name: option if option.name else option._replace(name=name) for name, option in options.items()}


def parse_choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"be one of {', '.join(choices)}")
        return text

    return parse


def parse_int(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None
        if number is None or number < low or (high is not None and number > high):
            limits = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"be a whole number {limits}")
        return number

    return parse


def parse_auto(parse: Callable[[str], int]) -> Callable[[str], int | None]:
    """Returns a parser like `parse` that also turns "auto" into None."""

    @functools.wraps(parse)
    def parse_or_auto(text: str) -> int | None:
        if text == "auto":
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"{error}, or auto") from None

    return parse_or_auto


def parse_seconds(*, above: bool = False) -> Callable[[str], float]:
    """Returns a parser of seconds. `above`: the number must be greater than 0, and not only at least 0."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if number > _LONGEST_S:
            raise ValueError(f"be at most {_LONGEST_S:.0f} seconds")
        if not math.isfinite(number) or number < 0 or (above and number == 0):
            raise ValueError(f"be a number of seconds {'above' if above else 'of at least'} 0")
        return number

    return parse


def parse_size(text: str) -> int:
    """Parses a size such as "20971520", "20MiB" or "512 KiB" to bytes."""
    match = re.fullmatch(r"([0-9]{1,15}) ?(|[kmg]ib)", text.lower())
    if match is None or int(match[1]) == 0:
        raise ValueError("be a size in bytes above 0, such as 20971520 or 20MiB")
    return int(match[1]) * _SIZES[match[2]]


def parse_moment(text: str) -> str:
    """Converts a date, or a date and a time, in ISO 8601 to UTC. A text without an offset is taken as UTC."""
    from datetime import UTC, datetime  # noqa: PLC0415 - few starts need it

    if not text:
        return ""
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise ValueError("be a date or a moment such as 2026-11-25 or 2026-11-25T14:30Z") from None
    return moment.isoformat(timespec="seconds")


def parse_switch(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError("be true or false")
    return _FLAGS[text.lower()]


def parse_device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise ValueError("be auto, cpu, cuda or cuda:N")
    return text


def parse_buckets(text: str) -> tuple[int, ...]:
    """Parses "1,4,16" to (1, 4, 16): batch sizes in increasing order; "auto" to (): the device decides."""
    if text == "auto":
        return ()
    if re.fullmatch(r"[0-9]{1,4}(, ?[0-9]{1,4})*", text):
        sizes = tuple(int(size) for size in text.split(","))
        if sizes[0] > 0 and all(a < b for a, b in pairwise(sizes)):
            return sizes
    raise ValueError("be batch sizes in increasing order, such as 1,4,16, or auto")


def parse_step_buckets(text: str) -> tuple[int, ...] | None:
    """Parses as `parse_buckets` does, but "auto" to None, and "none" to ()."""
    if text in ("auto", "none"):
        return None if text == "auto" else ()
    try:
        return parse_buckets(text)
    except ValueError as error:
        raise ValueError(f"{error}, or none") from None


def parse_path(text: str) -> Path:
    """Parses a path. "~" and "~user" are home folders."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("be a path, and after ~ the name of a user who has a home folder") from None


def parse_address(text: str) -> str:
    """Parses a URL, which is returned as it is, or a path, whose "~" is replaced."""
    return text if "://" in text or not text else str(parse_path(text))


def parse_paths(text: str) -> tuple[Path, ...]:
    """Parses "a.pem,b.pem" to two paths."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError("be file names separated by commas")
    return tuple(parse_path(name) for name in names)


def parse_name(text: str) -> str:
    """Parses a name that a URL's path can contain without encoding."""
    if not re.fullmatch(NAME, text) or "//" in text or text.endswith("/"):
        raise ValueError("be a name of letters, digits and . _ - @ :, and of / within, such as org/name:tag")
    return text


def parse_names(text: str) -> tuple[str, ...]:
    """Parses names such as "blip,tags", each as `parse_name` does."""
    return tuple(parse_name(name.strip()) for name in text.split(","))


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parses "a.example,b.example:8443" to two hosts, in lower case."""
    hosts = tuple(name.strip().lower() for name in text.split(","))
    if not all(re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?", host) for host in hosts):
        raise ValueError("be host names such as images.example.com, or with a port")
    return hosts


def parse_root_path(text: str) -> str:
    """Parses "/apps/cap/" to "/apps/cap". Allows only characters without a meaning in URLs and HTML."""
    path = text.rstrip("/")
    if len(path) > _LONGEST_ROOT_PATH or not _ROOT_PATH.fullmatch(path):
        raise ValueError("be a path such as /cap, of letters, digits and -._~")
    return path


def parse_host_names(text: str) -> tuple[str, ...]:
    """Parses "a.example,*.b.example" to two names, in lower case; "*" is every name."""
    names = tuple(name.strip().lower().rstrip(".") for name in text.split(","))
    if not all(
        name == "*" or re.fullmatch(r"(\*\.)?[a-z0-9_]([a-z0-9._-]{0,251}[a-z0-9])?", name) for name in names
    ):
        raise ValueError("be host names such as captions.example.com or *.example.com, without a port, or *")
    return names


def parse_origins(text: str) -> tuple[str, ...]:
    """Parses "https://a.example,http://localhost:3000" to two origins as browsers write them; "*" is any."""
    origins = []
    for name in text.split(","):
        found = _ORIGIN.fullmatch(name.strip().lower())
        if found is None and name.strip() != "*":
            raise ValueError("be origins such as https://app.example.com, without a path, or *")
        scheme, host, port = ("*", "", "") if found is None else found.groups()
        default = DEFAULT_PORTS.get(scheme) == port
        origins.append("*" if found is None else f"{scheme}://{host}{'' if default else port or ''}")
    return tuple(origins)
