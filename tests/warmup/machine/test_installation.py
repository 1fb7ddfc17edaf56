"""What is said of installed packages without importing them."""

import importlib.metadata
from pathlib import Path

import pytest

from snapcap.warmup.errors import BuildError
from snapcap.warmup.machine.installation import installed_version, require_compiler


@pytest.mark.parametrize("package", ["torch", "numpy", "prometheus_client", "safetensors"])
def test_versions_are_those_of_the_metadata(package: str) -> None:
    assert installed_version(package) == importlib.metadata.version(package)


def test_what_is_not_installed_has_no_version() -> None:
    assert installed_version("no_such_package") is None


def test_the_working_directory_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_package-1.0.dist-info").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert installed_version("no_such_package") is None


def test_the_first_folder_of_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("later", "1.0"), ("first", "2.0+cu130")):
        (tmp_path / name / f"no_such_package-{version}.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / name))
    assert installed_version("no_such_package") == "2.0+cu130"


@pytest.mark.parametrize("name", ["a b", "it's", "a\tb"])
def test_a_temporary_folder_that_compilers_cannot_be_told_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch splits its command lines at spaces: every package would fail, with "C++ compile error" alone."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setenv("CXX", "true")  # a program that is installed
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(BuildError, match="set TMPDIR to another folder"):
        require_compiler()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert require_compiler() == "true"
