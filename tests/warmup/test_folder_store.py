"""What is special about a store that is a folder: whose it is, and that what it holds is known to be right."""

import hashlib
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from warmup.files import describe
from warmup.folder_store import FolderStore
from warmup.manifest import Blob
from warmup.store import StoreRefusedError

NAME = "manifests/x.json"


def test_a_folder_is_private(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "store"
    store = FolderStore.open(root)
    store.write(NAME, b"x")
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / "manifests").stat().st_mode & 0o077 == 0
    assert (root / NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (root / "manifests").iterdir()] == ["x.json"]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(StoreRefusedError, match="chmod go-w"):
        FolderStore.open(tmp_path)
    assert FolderStore.open(tmp_path / "snapcap").root.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "theirs"
    root.mkdir(mode=0o755)
    if os.geteuid() == 0:
        os.chown(root, 4321, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(StoreRefusedError, match="belongs to user"):
        FolderStore.open(root)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreRefusedError, match="choose another"):
        FolderStore.open(tmp_path / "file")


def test_blobs_are_taken_and_given_only_when_right(local: FolderStore) -> None:
    content = b"content" * 100
    blob = Blob(hashlib.sha256(content).hexdigest(), len(content))
    assert local.verified(blob) is None
    with local.scratch() as folder:
        (folder / "wrong").write_bytes(content[:-1] + b"!")
        assert not local.adopt(folder / "wrong", blob)
        assert local.verified(blob) is None
        (folder / "right").write_bytes(content)
        assert local.adopt(folder / "right", blob)
    assert not folder.exists()
    path = local.verified(blob)
    assert path is not None
    assert describe(path) == blob
    path.write_bytes(content[:-1] + b"!")
    assert local.verified(blob) is None
    assert not path.exists()  # a damaged one makes room


def test_what_killed_processes_left_is_removed(local: FolderStore) -> None:
    with local.scratch() as busy:
        left = busy.parent / "left"
        left.mkdir()
        (left / "file").touch()
        os.utime(left, (time.time() - 7200,) * 2)
        with local.scratch():
            assert busy.exists()
            assert not left.exists()


def _race(root: Path, index: int, results: Any) -> None:
    results.put(FolderStore.open(root).write(NAME, b"%d" % index, if_absent=True) is not None)


def test_processes_compete_for_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_race, args=(tmp_path / "store", index, results)) for index in range(4)]
    for process in processes:
        process.start()
    won = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert won.count(True) == 1
