"""A copy of the demo model, and an artifact folder for its prepared weights."""

import shutil
from pathlib import Path

import pytest
from support.checkpoints.prepared_case import Case, case_of

from snapcap.warmup.weights import find, prepare


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that never stands still: what was just copied counts as at rest."""
    monkeypatch.setattr(find, "CLOCK_NS", 0)
    monkeypatch.setattr(prepare, "CLOCK_NS", 0)


@pytest.fixture
def folder(demo_folder: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("samples", "training", "*.py", "__pycache__")
    return shutil.copytree(demo_folder, tmp_path / "model", ignore=ignored)


@pytest.fixture
def case(folder: Path, tmp_path: Path, no_wait: None) -> Case:
    return case_of(folder, tmp_path / "cache")
