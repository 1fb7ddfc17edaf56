"""The memory that is free, by the machine and by the control groups of both versions."""

from pathlib import Path

import pytest

from snapcap.warmup.machine import capacity
from snapcap.warmup.machine.capacity import free_memory
from snapcap.warmup.machine.files import locked_alone

MIB = 1 << 20


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the control groups, of which this process has one of each version."""
    path = tmp_path / "cgroup"
    path.write_text("0::/pod/container\n4:memory:/docker/one\n")
    monkeypatch.setattr(capacity, "MEMBERSHIP", path)
    monkeypatch.setattr(capacity, "MOUNTS", tmp_path)
    return tmp_path


def test_a_machine_without_limits_has_its_own_memory(mounts: Path) -> None:
    alone = free_memory()
    assert alone > 0
    group(mounts / "pod" / "container", max="max\n", current="5\n", stat="active_file 0\ninactive_file 0\n")
    assert free_memory() > 0


def test_the_least_of_all_groups_counts_and_pages_of_files_are_free(mounts: Path) -> None:
    stat = f"anon 1\nactive_file {2 * MIB}\ninactive_file {MIB}\n"
    group(mounts / "pod" / "container", max=f"{10 * MIB}\n", current=f"{8 * MIB}\n", stat=stat)
    assert free_memory() == 5 * MIB
    stat = f"total_active_file {MIB}\ntotal_inactive_file 0\n"
    one = {"limit_in_bytes": str(4 * MIB), "usage_in_bytes": str(2 * MIB), "stat": stat}
    group(mounts / "memory" / "docker" / "one", **one)
    assert free_memory() == 3 * MIB


def test_a_group_that_is_over_its_limit_has_none(mounts: Path) -> None:
    stat = "active_file 0\ninactive_file 0\n"
    group(mounts / "pod" / "container", max="5\n", current="8\n", stat=stat)
    assert free_memory() == 0


@pytest.mark.parametrize("stat", ["", "active_file\n", "active_file many\ninactive_file 0\n", "a b c\n"])
def test_what_the_kernel_does_not_write_is_no_limit(stat: str, mounts: Path) -> None:
    group(mounts / "pod" / "container", max="5\n", current="8\n", stat=stat)
    assert free_memory() > 8


def test_one_has_a_lock_alone_and_nobody_waits(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked_alone(path) as first, locked_alone(path) as second:
        assert (first, second) == (True, False)
    with locked_alone(path) as again:
        assert again
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), locked_alone(path):
        pass


def test_where_there_are_no_locks_one_goes_on_without_and_no_file_stays_open(
    tmp_path: Path, without_locks: None, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with locked_alone(tmp_path / "lock") as first, locked_alone(tmp_path / "lock") as second:
        assert (first, second) == (None, None), "nobody can tell"
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    (line,) = caplog.messages
    assert line.startswith("flock is not available"), "it is said once"
