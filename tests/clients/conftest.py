"""One server with the demo model, under a name with a slash, for the clients of all APIs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server_process import ServerProcess

MODEL = "org/captioner"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with ServerProcess("--backend", "eager", "--cache-dir", cache, "--model-name", MODEL) as process:
        yield process.wait_ready()


@pytest.fixture(scope="session")
def url(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="session")
def model() -> str:
    """The name of the model."""
    return MODEL


@pytest.fixture(scope="session")
def sample(samples: dict[Path, str]) -> tuple[Path, str]:
    """An image and its caption."""
    return next(iter(samples.items()))
