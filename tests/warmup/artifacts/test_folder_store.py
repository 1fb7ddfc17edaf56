"""What is special about a store that is a folder: whose it is, and that what it holds is known to be right."""

import fcntl
import grp
import hashlib
import multiprocessing
import os
import pwd
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.fetch import fetch
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.lease import Lease, acquire
from snapcap.warmup.artifacts.manifest import Blob, Manifest, describe, seal
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.signing import Signer, Trust
from snapcap.warmup.artifacts.store import StoreError, StoreRefusedError

NAME = "manifests/x.json"
FS_GROUP = 65_432


def test_a_folder_is_private(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "store"
    store = FolderStore.open(root)
    store.write(NAME, b"x")
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / "manifests").stat().st_mode & 0o077 == 0
    assert (root / NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (root / "manifests").iterdir()] == ["x.json"]


@pytest.fixture
def volume_of_group(monkeypatch: pytest.MonkeyPatch) -> int:
    """The group that Kubernetes gives a Pod's volumes to (fsGroup), which only this process is known to be in."""
    monkeypatch.setattr(os, "getgroups", lambda: [os.getegid(), FS_GROUP])
    return FS_GROUP


def mount(root: Path, group: int) -> None:
    """Do what Kubernetes does with a volume at each mount where the Pod has an fsGroup."""
    if os.geteuid():
        pytest.skip("ONLY ROOT CAN GIVE A FILE TO A GROUP THAT IT IS NOT IN")
    for path in (root, *root.rglob("*")):
        os.chown(path, -1, group)
        path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))


def test_a_volume_that_a_group_of_this_process_alone_may_write_to_is_used(
    tmp_path: Path, manifest: Manifest, files: dict[str, Path], trust: Trust, volume_of_group: int
) -> None:
    local = FolderStore.open(tmp_path / "volume" / "store")
    local.vouch(seal(manifest, None))
    assert publish(local, manifest, files, None).result == "published"
    mount(tmp_path / "volume", volume_of_group)
    again = FolderStore.open(local.root)
    assert fetch(None, again, manifest.key, manifest.factors, Trust(), 60).result == "hit"
    assert local.root.stat().st_mode & 0o777 == 0o750, "nobody can change what is verified from now on"
    assert (local.root / "manifests").stat().st_mode & 0o020 == 0
    fetched = fetch(None, again, manifest.key, manifest.factors, trust, 60)
    assert fetched.result == "untrusted", "a member of the group may have written the note of who built it"


def test_what_a_member_of_the_group_signs_with_no_key_is_untrusted(
    tmp_path: Path, manifest: Manifest, files: dict[str, Path], signer: Signer, trust: Trust, volume_of_group: int
) -> None:
    local = FolderStore.open(tmp_path / "volume" / "store")
    assert publish(local, manifest, files, signer).result == "published"
    mount(tmp_path / "volume", volume_of_group)
    assert fetch(None, FolderStore.open(local.root), manifest.key, manifest.factors, trust, 60).result == "hit"
    path = local.root / f"manifests/{manifest.key}.json"
    evil = seal(manifest, None)
    path.write_bytes(evil)  # in place, so that the file stays ours
    local.vouch(evil)
    mount(tmp_path / "volume", volume_of_group)
    assert fetch(None, local, manifest.key, manifest.factors, trust, 60).result == "untrusted"


@pytest.mark.parametrize("known", ["member", "primary group", "not in it"])
def test_a_group_with_others_in_it_is_refused(
    tmp_path: Path, known: str, monkeypatch: pytest.MonkeyPatch, volume_of_group: int
) -> None:
    (tmp_path / "store").mkdir()
    mount(tmp_path / "store", volume_of_group)
    mallory = pwd.struct_passwd(("mallory", "x", 4321, 4321, "", "/", ""))
    match known:
        case "member":
            group = grp.struct_group(("volume", "x", FS_GROUP, ["mallory"]))
            monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
        case "primary group":
            mallory = pwd.struct_passwd(("mallory", "x", 4321, FS_GROUP, "", "/", ""))
        case _:
            monkeypatch.setattr(os, "getgroups", lambda: [os.getegid()])
    users = [*pwd.getpwall(), mallory]
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    said = "fsGroupChangePolicy" if known == "not in it" else r"\(mallory\).*fsGroupChangePolicy"
    with pytest.raises(StoreRefusedError, match=said):
        FolderStore.open(tmp_path / "store")


@pytest.mark.parametrize("mode", [0o707, 0o1777, 0o702, 0o777])
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


def test_what_killed_processes_left_is_removed_and_nothing_else(local: FolderStore) -> None:
    """A folder named tmp may have been there before, if somebody's own folder was chosen as the store."""
    hour_ago = (time.time() - 7200,) * 2
    with local.scratch() as busy:
        parent = busy.parent.parent
        left = parent / "snapcap-fetch-left"
        (left / "files").mkdir(parents=True)
        (left / "lock").touch()
        theirs = [parent / "thesis", parent / "snapcap-fetch-unlocked"]
        for folder in (*theirs, left):
            (folder / "files").mkdir(parents=True, exist_ok=True)
            (folder / "files" / "file").touch()
        for path in (left / "lock", *theirs, left, busy.parent / "lock"):
            os.utime(path, hour_ago)
        with local.scratch():
            assert busy.exists()
            assert not left.exists()
            assert all((folder / "files" / "file").exists() for folder in theirs)


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


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_no_umask_lets_others_in(tmp_path: Path, umask: int, manifest: Manifest, files: dict[str, Path]) -> None:
    before = os.umask(umask)
    try:
        store = FolderStore.open(tmp_path / "deep" / "cache" / "store")
        store.vouch(b"envelope")
        assert publish(store, manifest, files, None).result == "published"
        assert acquire(store, manifest.key, 60)
        with store.scratch():
            made = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
            modes = {path: path.stat().st_mode & 0o777 for path in made if "snapcap-fetch" not in str(path)}
    finally:
        os.umask(before)
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert len(modes) > 10


@pytest.mark.parametrize("below", ["manifests", "blobs", "blobs/sha256", "built", "leases", "builds", "tmp"])
@pytest.mark.parametrize("mode", [0o777, 0o707])
def test_a_folder_below_that_others_may_write_to_is_refused(local: FolderStore, below: str, mode: int) -> None:
    (local.root / below).mkdir(parents=True)
    FolderStore.open(local.root)
    (local.root / below).chmod(mode)
    with pytest.raises(StoreRefusedError, match=rf"local/{below} .*: chmod go-w it$"):
        FolderStore.open(local.root)


def test_a_file_that_others_may_write_is_refused(local: FolderStore) -> None:
    local.write(NAME, b"x")
    local.path(NAME).chmod(0o602)
    with pytest.raises(StoreRefusedError, match=r"x\.json .*: chmod go-w it$"):
        local.read(NAME, 100)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_and_folders_of_somebody_else_are_refused(local: FolderStore) -> None:
    local.write(NAME, b"x")
    os.chown(local.path(NAME), 4321, -1)
    with pytest.raises(StoreRefusedError, match="belongs to user 4321"):
        local.read(NAME, 100)
    os.chown(local.root / "manifests", 4321, -1)
    with pytest.raises(StoreRefusedError, match="belongs to user 4321"):
        FolderStore.open(local.root)


def test_a_volume_that_a_pod_may_write_by_its_group_holds_a_private_store(tmp_path: Path) -> None:
    """As Kubernetes mounts one with fsGroup: of root, with the set-group-id bit, and writable by all."""
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o2777)
    store = FolderStore.open(volume / "store")
    store.write(NAME, b"x")
    FolderStore.open(volume / "store")
    assert (volume / "store").stat().st_mode & 0o777 == 0o700
    assert (volume / "store" / "manifests").stat().st_mode & 0o777 == 0o700


def test_a_lock_that_is_not_given_back_is_given_up(local: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapcap.warmup.artifacts.folder._LOCK_SECONDS", 0.2)
    local.write(NAME, b"x", if_absent=True)
    with (local.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=r"is locked by another process for over 0\.2 s"):
            local.write(NAME, b"y", if_absent=True)
    assert local.write(NAME, b"y", if_absent=True) is None


@pytest.mark.usefixtures("without_locks")
def test_a_folder_without_locks_stores_all_the_same_and_leases_exclude_nobody(local: FolderStore) -> None:
    assert not local.is_conditional()
    first, second = (acquire(local, "c" * 64, 60, owner) for owner in ("a", "b"))
    assert isinstance(first, Lease)
    assert isinstance(second, Lease)
    assert not first.exclusive, "both build, and one of them publishes"
    assert local.write(NAME, b"x", if_absent=True) is not None
    assert local.write(NAME, b"y", if_absent=True) is None
    with local.scratch() as folder, local.scratch() as other:
        assert folder.is_dir(), "nobody can tell whether it was left behind, and it is new"
        (folder / "file").touch()
        hour_ago = (time.time() - 7200,) * 2
        os.utime(other.parent / "lock", hour_ago)
        with local.scratch():
            assert (folder / "file").exists()
            assert not other.exists(), "no fetch takes that long"


def test_an_envelope_is_vouched_for_in_its_own_folder_alone(local: FolderStore, tmp_path: Path) -> None:
    local.vouch(b"ours")
    assert FolderStore.open(local.root).is_vouched(b"ours")
    assert not local.is_vouched(b"theirs")
    shutil.copytree(local.root, tmp_path / "copy")
    assert not FolderStore.open(tmp_path / "copy").is_vouched(b"ours")
