"""The import of the web framework, in the order in which it costs a start least."""

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from warmup.cpus import available_cpus
from warmup.torch_libraries import load_torch_libraries

# What has compiled parts. The dynamic linker does one thing at a time, and Python waits for it with its lock held.
_COMPILED = ("asyncio", "csv", "httptools", "prometheus_client", "pydantic.fields", "ssl", "uvicorn", "uvloop")


def import_web() -> None:
    """Import FastAPI, which is Python code, while torch's libraries load on another CPU, which needs no Python.
    Where there is one CPU only, they wait until /livez answers, as torch does."""
    # Plugins are looked for in the metadata of every installed package. The server's models are documentation.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    for name in _COMPILED:
        importlib.import_module(name)
    if available_cpus() > 1:
        threading.Thread(target=load_torch_libraries, name="torch-libraries", daemon=True).start()
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
