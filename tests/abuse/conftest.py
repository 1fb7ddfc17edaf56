"""Starts one real server for all attacks; an attack that needs other options starts its own.

They end with this folder, a package for that reason: servers and what watches them would slow all later tests.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.attacks.abuse import Abused


@pytest.fixture(scope="package")
def abused(samples: dict[Path, str], compiled_options: tuple[str, ...]) -> Iterator[Abused]:
    """With the demo model, compiled, a queue of 16 and the default limits otherwise."""
    with Abused(samples, *compiled_options) as server:
        yield server


@pytest.fixture(scope="package")
def impatient(samples: dict[Path, str], compiled_options: tuple[str, ...]) -> Iterator[Abused]:
    """With a time limit of a body that a test can wait for."""
    with Abused(samples, *compiled_options, "--body-timeout", "2") as server:
        yield server
