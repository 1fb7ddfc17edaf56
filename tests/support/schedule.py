"""Orders the files of a run, and spreads them over its workers: long ones first, so that none ends alone.

Attacks and servers that hang mostly wait, and tests that compile keep the CPUs busy. For that reason a run has a
worker more than the machine has CPUs: while one waits, the others compile. All attacks run on one worker, which
starts their servers once.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
TOGETHER = "tests/abuse/"
# Paths, or folders of them. The first one has the store built that most of the others use; the second needs none.
FIRST = (
    "deploy/test_kubernetes_run.py",
    "models/processing/test_image_memory.py",
    "abuse",
    "e2e/test_compiled_start.py",
    "e2e/test_qwen3_vl.py",
    "e2e/test_florence2.py",
    "e2e/test_smolvlm.py",
    "e2e/test_llava.py",
    "e2e/test_git.py",
    "e2e/test_blip.py",
    "warmup/start/test_jit_families.py",
    "models/regions/test_kernels.py",
    "e2e/test_interrupted_build.py",
    "e2e/test_shared_build.py",
    "deploy/test_observed_server.py",
    "service/test_hung_server.py",
    "e2e",
    "deploy",
    "benchmarks",
    "clients",
    "documents",
)


@cache
def rank(path: Path) -> int:
    """Place of a file's line in ``FIRST``; those that have none follow in their own order."""
    return next((place for place, first in enumerate(FIRST) if path.is_relative_to(TESTS / first)), len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns the number of workers of `-n auto`; `-n logical` gives each CPU one, for tests that never wait."""
    return len(os.sched_getaffinity(0)) + (config.getoption("numprocesses") == "auto")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules as `--dist loadfile` does, but keeps the files of one folder together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)

    return Scheduling(config, log)
