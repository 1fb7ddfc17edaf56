"""Reads the options from the command line and the environment; an argument wins over its variable.

A variable that is set to the empty text counts as unset. Anything unknown or out of range raises SettingsError.
"""

import argparse
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, NoReturn

from snapcap.models.errors import UserError, suggestion
from snapcap.service.config.settings import GROUPS, Settings
from snapcap.warmup.option import Option, options_of

# Groups of options that `build` and `explain` take: all that decide about artifacts and their place.
BUILD_GROUPS = ("model", "compute", "images", "store", "s3", "log")
# Options of these groups that `build` and `explain` do not take: a build compiles all buckets or fails, and decodes
# no image.
BUILD_WITHOUT = ("strict", "build", "max_pixels", "decode_threads", "decode_memory", "decode_timeout")
_PREFIX = "SNAPCAP_"
# Variables that Kubernetes sets in every container of a namespace with a Service whose name begins with "snapcap".
_SERVICE_LINK = re.compile(
    r"SNAPCAP_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_LINK_URL = re.compile(r"(?:tcp|udp|sctp)://.*")


class SettingsError(UserError, ValueError):
    """An option or variable has a bad value, or does not exist. The message is one line that names it and says what
    it must be."""


class Parser(argparse.ArgumentParser):
    """Reports errors of the command line as SettingsError."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see {self.prog} --help")


def add_arguments(
    parser: argparse.ArgumentParser,
    groups: Iterable[str],
    *,
    without: Container[str] = (),
    shown: Container[str] | None = None,
) -> None:
    """Adds the options of these groups to a parser. Values stay text: `read_settings` parses them.

    `without` names the options that the command does not use, which are left out. `shown` names the options that
    the help shows, in one section; the parser accepts the other options too."""
    for name in groups:
        group = GROUPS[name]
        section: argparse._ActionsContainer = parser
        if shown is None:
            section = parser.add_argument_group(f"options: {name.replace('_', ' ')}", group.__doc__)
        for option in options_of(group).values():
            if option.name not in without:
                text = f"{option.help} [default: {option.default_text}; {option.variable}]".replace("%", "%%")
                hidden = shown is not None and option.name not in shown
                _add_argument(section, option, argparse.SUPPRESS if hidden else text)


def _add_argument(section: argparse._ActionsContainer, option: Option, text: str) -> None:
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if option.is_switch:
        section.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    elif option.repeatable:
        section.add_argument(option.flag, action="append", metavar=option.metavar, **common)
    else:
        section.add_argument(option.flag, metavar=option.metavar, **common)


def read_settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Returns the settings: of each option the argument if given, else the variable, else the default. Raises
    SettingsError for a bad value and for an unknown SNAPCAP_* variable."""
    _refuse_unknown_variables(environ)
    groups: dict[str, Any] = {}
    for name, group in GROUPS.items():
        values: dict[str, Any] = {}
        for field, option in options_of(group).items():
            given = getattr(arguments, option.name, None)
            if isinstance(given, list):
                given = ",".join(given)
            if isinstance(given, bool):
                values[field] = given
            elif given is not None:
                values[field] = _parse(option, option.flag, given)
            elif text := environ.get(option.variable, "").strip():  # files of variables end lines with CR LF
                values[field] = _parse(option, option.variable, text)
        groups[name] = group(**values)
    return Settings(**groups)


def settings_of(values: Mapping[str, Any], groups: Iterable[str]) -> Settings:
    """Returns settings from a program's values. An option that is not given has its default; the environment is not
    read. Raises SettingsError as `fields_of` does."""
    chosen = fields_of(values, groups)
    return Settings(**{group: GROUPS[group](**fields) for group, fields in chosen.items()})


def fields_of(
    values: Mapping[str, Any], groups: Iterable[str], without: Container[str] = (), owner: str = ""
) -> dict[str, dict[str, Any]]:
    """Returns the fields of each group that a program's values set, by the names of options: text, numbers, paths,
    booleans, or lists of these. `without` names options that may not be set. `owner` follows a name in errors.
    Raises SettingsError for a bad value and for an option that none of these groups has."""
    options = {
        option.name: (group, field, option)
        for group in groups
        for field, option in options_of(GROUPS[group]).items()
        if option.name not in without
    }
    chosen: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in options:
            raise SettingsError(f"unknown option {name[:80]}{owner}{suggestion(name, options)}")
        if value is None or (isinstance(value, list | tuple) and not value):
            continue  # the same as an option that is not given
        group, field, option = options[name]
        chosen.setdefault(group, {})[field] = _parse(option, f"{name}{owner}", _text_of(value))
    return chosen


def _text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _parse(option: Option, source: str, text: str) -> Any:
    try:
        return option.parse(text)
    except ValueError as error:
        raise SettingsError(f"{source} must {error}, not {text[:80]!r}{suggestion(text, option.choices)}") from None


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = {option.variable for group in GROUPS.values() for option in options_of(group).values()}
    for variable in sorted(environ):
        if not variable.startswith(_PREFIX):
            continue
        if _is_service_link(variable, environ[variable]):
            raise SettingsError(
                f"{variable} was set by Kubernetes for a Service, not by you: "
                "put `enableServiceLinks: false` in the pod's spec, or rename the Service"
            )
        if variable not in known:
            raise SettingsError(f"unknown environment variable {variable}{_suggest_variable(variable, known)}")


def _suggest_variable(variable: str, known: Iterable[str]) -> str:
    # The common prefix would make every name look close.
    close = suggestion(variable.removeprefix(_PREFIX), (name.removeprefix(_PREFIX) for name in known))
    return close.replace("did you mean ", f"did you mean {_PREFIX}")


def _is_service_link(variable: str, value: str) -> bool:
    if variable.endswith("_PORT") and _SERVICE_LINK_URL.fullmatch(value):
        return True
    return _SERVICE_LINK.fullmatch(variable) is not None
