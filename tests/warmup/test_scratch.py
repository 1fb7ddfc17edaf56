"""Temporary folders that outlive their process are removed by the next one; those of the living are not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.server_process import clean_environment

from warmup.scratch import scratch_folder

PROGRAM = """
import sys
from warmup.scratch import scratch_folder
with scratch_folder("scratch-test-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def other_process(temporary: Path) -> "tuple[subprocess.Popen[str], Path]":
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
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
