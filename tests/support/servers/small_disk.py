"""Provides a disk that fills up: a file system of its own where one may be mounted, or one that seems full."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL = 1024 * 1024  # bytes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 1 MiB; skips where nothing may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL},mode=0700", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("NOTHING MAY BE MOUNTED HERE: RUN AS ROOT TO TEST AGAINST A REAL FULL DISK")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def disk_that_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past 100,000 bytes there is no space; the write that comes there is cut short, as a full disk does it."""
    real = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        room = 100_000 - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, memoryview(data)[:room], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.fixture
def short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call writes 1,000 bytes at most, of which the system makes no error."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, memoryview(data)[:1000], offset))


def fill(folder: Path) -> None:
    """Leave no space at all."""
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
