"""One real server under all attacks of a session; an attack that needs other options starts its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.abuse import Abused


@pytest.fixture(scope="session")
def abused(samples: dict[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Abused]:
    """With the demo model, eager, a queue of 16 and the default limits otherwise."""
    with Abused(samples, tmp_path_factory.mktemp("abused")) as server:
        yield server


@pytest.fixture(scope="session")
def impatient(samples: dict[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Abused]:
    """With a time limit of a body that a test can wait for."""
    with Abused(samples, tmp_path_factory.mktemp("impatient"), "--body-timeout", "2") as server:
        yield server
