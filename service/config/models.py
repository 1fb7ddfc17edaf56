"""Reads which models a server has: from repeated `--model NAME=MODEL` options, and from the file of `--models`."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapcap.models.errors import suggestion
from snapcap.service.config.reader import SettingsError, fields_of
from snapcap.service.config.settings import ResidencySettings, Settings
from snapcap.warmup.option import NAME, parse_name

MOST_MODELS = 64
MOST_FILE_BYTES = 1 << 20
_BETWEEN = re.compile(rf",(?={NAME}=)")
_TABLE = 'must be a table such as [blip] with model = "org/name"'
# The options of a model that concern the server, or its cache folder, which all models share.
_SHARED = ("cache_dir",)


def models_of(settings: Settings) -> dict[str, Settings]:
    """Returns the settings of each model by its name, the first model first. Returns {} for a server of one model
    that stays in memory. Raises SettingsError if an option or the file of the models is wrong. The message is one
    line."""
    named = _from_options(settings.model.source)
    if not named and settings.residency == ResidencySettings():
        return {}
    models = {name: {"model": source} for name, source in named}
    if len(models) < len(named):
        raise SettingsError("--model has a name twice; give each model a name of its own")
    if settings.residency.models is not None:
        if not named and settings.model.source != Settings().model.source:
            raise SettingsError("--model must be NAME=MODEL beside --models; each model has a name")
        for name, table in _from_file(settings.residency.models):
            if name in models:
                raise SettingsError(f"--models has the model {name!r}, which --model has too; leave one out")
            models[name] = table
    elif not named:
        models[settings.http.model_name or settings.model.source] = {}
    if len(models) > MOST_MODELS:
        raise SettingsError(f"there are {len(models)} models; a server has at most {MOST_MODELS}")
    found = {name: _settings(settings, name, table) for name, table in models.items()}
    if len(found) > 1 and settings.http.model_name is not None:
        raise SettingsError("--model-name names one model; name several as --model NAME=MODEL")
    preload = settings.residency.preload
    for name in preload:
        if name not in found and preload not in (("auto",), ("all",), ("none",)):
            raise SettingsError(f"--preload: there is no model {name!r}{suggestion(name, found)}")
    return found


def preloaded(settings: Settings, models: Mapping[str, Settings]) -> list[str]:
    """Returns the names of the models that must be ready before READY, in the order of `models`."""
    asked = settings.residency.preload or ("auto",)
    if asked == ("auto",):
        residency = settings.residency
        leave = residency.idle_unload or residency.device_memory or residency.host_memory
        asked = ("none",) if leave else ("all",)
    if asked == ("none",):
        return []
    return [name for name in models if asked == ("all",) or name in asked]


def _from_options(source: str) -> list[tuple[str, str]]:
    """Returns name and source of each model in the text of `--model`; [] if the text is one source."""
    parts = _BETWEEN.split(source)
    alone = len(parts) == 1 and not re.fullmatch(NAME, source.partition("=")[0])
    if "=" not in source or alone or source.startswith("s3://") or os.path.exists(source):
        return []
    found = []
    for part in parts:
        name, _, each = part.partition("=")
        if not each or "," in each:
            raise SettingsError(f"--model {part[:80]} must be NAME=MODEL; repeat the option for each model")
        _check_name(name, "--model")
        found.append((name, each))
    return found


def _check_name(name: str, option: str) -> None:
    try:
        parse_name(name)
    except ValueError as error:
        raise SettingsError(f"{option}: the name {name[:80]!r} must {error}") from None


def _from_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import tomllib  # noqa: PLC0415  few servers have such a file

    try:
        with path.open("rb") as file:
            data = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"--models {path} cannot be read: {error.strerror or error}") from None
    if len(data) > MOST_FILE_BYTES:
        raise SettingsError(f"--models {path} has more than {MOST_FILE_BYTES >> 20} MiB")
    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))  # editors on Windows write a mark at the beginning
    except (ValueError, RecursionError) as error:  # ValueError: also of a number with thousands of digits
        raise SettingsError(f"--models {path} is no TOML file: {str(error)[:200]}") from None
    if not tables:
        raise SettingsError(f"--models {path} has no model; each {_TABLE}")
    for name, table in tables.items():
        if not isinstance(table, dict) or not isinstance(table.get("model"), str):
            raise SettingsError(f"--models {path}: {name[:80]!r} {_TABLE}")
        _check_name(name, f"--models {path}")
        yield name, table


def _settings(settings: Settings, name: str, table: Mapping[str, Any]) -> Settings:
    """Returns the server's settings with a model's own options and name."""
    changed = fields_of(table, ("model", "compute"), _SHARED, f" of the model {name!r}")
    groups = {group: replace(getattr(settings, group), **fields) for group, fields in changed.items()}
    return replace(settings, **groups, http=replace(settings.http, model_name=name))
