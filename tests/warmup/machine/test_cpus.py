"""How many CPUs a process may use, by its affinity and its control groups."""

import os
from pathlib import Path

import pytest

from snapcap.warmup.machine import capacity
from snapcap.warmup.machine.capacity import all_but_one, available_cpus, cpu_limit, whole_cpus


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        pytest.param("0::/", {"cpu.max": "400000 100000"}, 4.0, id="a container of version 2"),
        pytest.param("0::/", {"cpu.max": "max 100000"}, None, id="without a limit"),
        pytest.param("0::/", {"cpu.max": "50000 100000"}, 0.5, id="less than one"),
        pytest.param("0::/", {}, None, id="no such controller"),
        pytest.param(
            "0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2.5, id="of the outer"
        ),
        pytest.param(
            "0::/a/b", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "250000 100000"}, 1.0, id="the least"
        ),
        pytest.param("0::/a", {"unified/a/cpu.max": "200000 100000"}, 2.0, id="beside version 1"),
        pytest.param(
            "4:cpu,cpuacct:/docker/1",
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3.0,
            id="version 1, where the container's group is its root",
        ),
        pytest.param(
            "1:cpu:/a",
            {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
            None,
            id="version 1 without a limit",
        ),
        pytest.param("5:memory:/", {"memory/cpu.max": "100000 100000"}, None, id="of another controller"),
        pytest.param("0::/", {"cpu.max": "400000"}, None, id="not as the kernel writes it"),
        pytest.param("0::/", {"cpu.max": "400000 0"}, None, id="no period"),
    ],
)
def test_the_limit_is_that_of_the_control_groups(
    membership: str, files: dict[str, str], limit: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "membership", membership)
    for name, text in files.items():
        write(tmp_path / "mounts" / name, text)
    monkeypatch.setattr(capacity, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(capacity, "MOUNTS", tmp_path / "mounts")
    assert cpu_limit() == limit


def test_a_control_group_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes any bytes but a line break."""
    name = b"caf\xe9\x0b"
    (tmp_path / "membership").write_bytes(b"0::/" + name + b"\n")
    write(tmp_path / os.fsdecode(name) / "cpu.max", "300000 100000")
    monkeypatch.setattr(capacity, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(capacity, "MOUNTS", tmp_path)
    assert cpu_limit() == 3.0


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "MEMBERSHIP", tmp_path / "membership")
    assert cpu_limit() is None


@pytest.mark.parametrize(
    ("limit", "available", "whole", "threads"),
    [(None, 16, 16, 15), (0.5, 1, 1, 1), (2.0, 2, 2, 1), (2.5, 3, 2, 2), (64.0, 16, 16, 15)],
)
def test_cpus_are_those_of_affinity_and_limit(
    limit: float | None, available: int, whole: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(capacity, "cpu_limit", lambda: limit)
    assert available_cpus() == available
    assert whole_cpus() == whole
    assert all_but_one() == threads
