"""Imports FastAPI fast: without plugins, and with models that are built when they are first used."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager


def import_web() -> None:
    """Import FastAPI, while the engine process imports torch."""
    # Plugins are looked for in the metadata of every installed package. The server's models are documentation.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    with _deferred_models():
        importlib.import_module("fastapi")


@contextmanager
def _deferred_models() -> Iterator[None]:
    """Models that are defined meanwhile are built when they are first used: FastAPI's are those of the OpenAPI
    document, which few processes are ever asked for."""
    from pydantic import BaseModel  # noqa: PLC0415

    BaseModel.model_config["defer_build"] = True
    try:
        yield
    finally:
        del BaseModel.model_config["defer_build"]
