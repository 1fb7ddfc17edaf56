"""How much memory a server may take, and how it is divided."""

import os
import resource
from pathlib import Path

import pytest

from snapcap.service import memory
from snapcap.service.config.settings import HttpLimits, Settings
from snapcap.service.memory import body_memory, decode_memory, memory_limit
from snapcap.warmup.machine import capacity

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _machine_of_64_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", values.__getitem__)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def grouped(monkeypatch: pytest.MonkeyPatch, membership: Path, mounts: Path) -> None:
    """Has the process find its control groups in these places."""
    monkeypatch.setattr(capacity, "MEMBERSHIP", membership)
    monkeypatch.setattr(capacity, "MOUNTS", mounts)


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        pytest.param("0::/", {"memory.max": str(4 * GIB)}, 4 * GIB, id="a container of version 2"),
        pytest.param("0::/", {"memory.max": "max"}, 64 * GIB, id="without a limit"),
        pytest.param("0::/", {}, 64 * GIB, id="no such controller"),
        pytest.param(
            "0::/a/b", {"a/b/memory.max": "max", "a/memory.max": str(2 * GIB)}, 2 * GIB, id="of the outer group"
        ),
        pytest.param(
            "9:memory:/docker/1",
            {"memory/memory.limit_in_bytes": str(3 * GIB)},
            3 * GIB,
            id="version 1, where the container's group is its root",
        ),
        pytest.param(
            "9:memory:/", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, 64 * GIB, id="version 1, unlimited"
        ),
        pytest.param("9:cpu:/", {"memory/memory.limit_in_bytes": str(GIB)}, 64 * GIB, id="of another controller"),
        pytest.param("0::/", {"memory.max": "many"}, 64 * GIB, id="not as the kernel writes it"),
    ],
)
def test_the_limit_is_that_of_the_control_groups_and_the_machine(
    membership: str, files: dict[str, str], limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "membership", membership)
    for name, text in files.items():
        write(tmp_path / "mounts" / name, text)
    grouped(monkeypatch, tmp_path / "membership", tmp_path / "mounts")
    assert memory_limit() == limit


def test_a_limit_of_the_address_space_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (GIB, GIB))
    grouped(monkeypatch, tmp_path / "none", tmp_path)
    assert memory_limit() == GIB


@pytest.mark.parametrize(
    ("limit", "bodies", "pixels"),
    [
        pytest.param(4, GIB // 4, GIB, id="small"),
        pytest.param(1024, GIB, 4 * GIB, id="not without end"),
    ],
)
def test_a_container_divides_what_it_has(
    limit: int, bodies: int, pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: limit * GIB)
    assert (body_memory(HttpLimits()), decode_memory(Settings())) == (bodies, pixels)
