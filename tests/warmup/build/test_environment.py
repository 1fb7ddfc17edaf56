"""Compilers ask no CPU for its vector instructions if they compile for a GPU, and need no locks on files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor import cpu_vec_isa
from torch.utils import _filelock

from snapcap.warmup.build.environment import compiler_environment, skip_denied_locks, skip_vector_tests


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The instruction sets that Inductor compiles a test program for; every one passes."""
    seen: list[str] = []

    def check_build(isa: cpu_vec_isa.VecISA, _code: str) -> bool:
        seen.append(str(isa))
        return True

    fresh = [type(isa)() for isa in cpu_vec_isa.supported_vec_isa_list]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", fresh)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2"])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()
    yield seen
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()


def test_no_test_program_is_compiled_for_a_gpu(tested: list[str]) -> None:
    skip_vector_tests("cuda")
    assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa
    assert tested == []


def test_for_a_cpu_inductor_looks_as_it_does_by_itself(tested: list[str]) -> None:
    skip_vector_tests("cpu")
    assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"
    assert tested == ["avx2"]


def test_where_there_are_no_locks_a_compiler_takes_none_and_has_its_folder_for_itself(
    without_locks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_filelock, "FileLock", _filelock.FileLock)  # restored at the end
    with pytest.raises((OSError, NotImplementedError)), _filelock.FileLock(str(tmp_path / "lock"), timeout=0):
        raise OSError  # newer versions of filelock do without flock where it is not implemented
    skip_denied_locks(tmp_path)
    for _ in range(2):
        with _filelock.FileLock(str(tmp_path / "another"), timeout=600):
            assert not (tmp_path / "another").exists()
    folders = {compiler_environment(tmp_path, "cpu", 1, {})["TORCHINDUCTOR_CACHE_DIR"] for _ in range(3)}
    assert len(folders) == 3


def test_where_there_are_locks_compilers_share_a_folder_and_lock_it(tmp_path: Path) -> None:
    before = _filelock.FileLock
    skip_denied_locks(tmp_path)
    assert _filelock.FileLock is before
    folders = {compiler_environment(tmp_path, "cpu", 1, {})["TORCHINDUCTOR_CACHE_DIR"] for _ in range(3)}
    assert len(folders) == 1
