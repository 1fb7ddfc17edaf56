"""Orders the tests for workers of pytest-xdist, a file each (`make test WORKERS=2`)."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take minutes come first, so that no worker is left alone with them at the end; in one process
    what fails fast does. Whoever is first to need the built store waits for the compilers."""
    for item in items:
        if "built_cache" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parent != TESTS)
