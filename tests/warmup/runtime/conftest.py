"""Compiles the CPU library once for the tests of a file."""

import pytest
from support.checkpoints.cpu_library import compiled_library

from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.runtime.aoti.packages import open_cpu_library


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> int:
    return open_cpu_library(VerifiedFile.of(compiled_library(tmp_path_factory.mktemp("library"))))
