"""Temporary folders that outlive their process are removed by the next one; those of the living are not."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.programs import denied
from support.servers.server_process import clean_environment

from snapcap.warmup.machine.files import scratch_folder

PROGRAM = """
import sys
from snapcap.warmup.machine.files import scratch_folder
with scratch_folder("scratch-test-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def other_process(
    temporary: Path, program: Sequence[str] = (sys.executable, "-c", PROGRAM)
) -> "tuple[subprocess.Popen[str], Path]":
    process = subprocess.Popen(
        program,
        env=clean_environment(TMPDIR=str(temporary)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_with_its_block(temporary: Path) -> None:
    with scratch_folder("scratch-test-") as folder:
        (folder / "file").touch()
        assert folder.parent.parent == temporary
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_is_not(temporary: Path) -> None:
    foreign = temporary / "scratch-test-of-somebody-else"
    foreign.mkdir()
    process, theirs = other_process(temporary)
    with process:
        with scratch_folder("scratch-test-"):
            assert (theirs / "file").exists()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (theirs / "file").exists()
        with scratch_folder("another-prefix-"):
            assert theirs.exists()
        with scratch_folder("scratch-test-") as folder:
            assert set(temporary.iterdir()) == {foreign, folder.parent}


def test_of_two_processes_each_has_its_own(temporary: Path) -> None:
    process, theirs = other_process(temporary)
    with process, scratch_folder("scratch-test-") as ours:
        assert set(temporary.iterdir()) == {theirs.parent, ours.parent}
        process.communicate("")
        assert set(temporary.iterdir()) == {ours.parent}


def planted(temporary: Path, name: str) -> Path:
    """A folder of our name, as another user of the machine may have made one."""
    folder = temporary / f"scratch-test-{name}"
    folder.mkdir(0o700)
    (folder / "file").touch()
    return folder


@pytest.mark.timeout(60)  # against for ever
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "hard link", "socket"])
def test_a_lock_that_is_no_file_of_ours_is_left_alone_and_waited_for_by_nobody(
    temporary: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    folder, elsewhere = planted(temporary, "planted"), tmp_path_factory.mktemp("elsewhere") / "mine"
    elsewhere.touch()
    lock = folder / "lock"
    if kind == "fifo":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    elif kind == "link":
        lock.symlink_to(elsewhere)
    elif kind == "hard link":
        lock.hardlink_to(elsewhere)
    else:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(lock))
    with scratch_folder("scratch-test-"):
        assert (folder / "file").exists()


def test_a_link_to_a_folder_is_not_followed(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    mine = tmp_path_factory.mktemp("mine")
    for name in ("lock", "thesis"):
        (mine / name).touch()
    (temporary / "scratch-test-link").symlink_to(mine)
    (temporary / "scratch-test-file").touch()
    os.mkfifo(temporary / "scratch-test-fifo")
    with scratch_folder("scratch-test-"):
        assert (mine / "thesis").exists()


@pytest.mark.parametrize("mode", [0o777, 0o707])
def test_a_folder_that_others_may_write_to_is_not_ours(temporary: Path, mode: int) -> None:
    folder = planted(temporary, "shared")
    (folder / "lock").touch()
    folder.chmod(mode)
    with scratch_folder("scratch-test-"):
        assert (folder / "file").exists()
    folder.chmod(0o700)
    with scratch_folder("scratch-test-"):
        assert not folder.exists()


def test_links_inside_what_is_removed_are_not_followed(
    temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mine = tmp_path_factory.mktemp("mine")
    (mine / "thesis").touch()
    folder = planted(temporary, "abandoned")
    (folder / "lock").touch()
    (folder / "files").mkdir()
    for link in (folder / "link", folder / "files" / "link"):
        link.symlink_to(mine)
    with scratch_folder("scratch-test-"):
        assert not folder.exists()
        assert (mine / "thesis").exists()


def test_a_folder_of_a_process_without_locks_is_not_taken_for_an_abandoned_one(temporary: Path) -> None:
    """A filter of system calls may deny one process what another has."""
    program = (sys.executable, denied.__file__, "EPERM", "flock", "--", sys.executable, "-c", PROGRAM)
    process, theirs = other_process(temporary, program)
    with process:
        with scratch_folder("scratch-test-"):
            assert (theirs / "file").exists()
        process.kill()
