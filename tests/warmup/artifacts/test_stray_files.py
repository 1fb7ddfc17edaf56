"""What lies in a store and is not of snapcap: it is neither read for ever, nor an error, nor removed."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.fetch import fetch
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import artifact_key, canonical_json
from snapcap.warmup.artifacts.manifest import Manifest, describe
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import OWNER, Signer, Trust
from snapcap.warmup.artifacts.store import blob_name, manifest_name
from snapcap.warmup.machine.files import NotAFileError, open_regular

STALE = {"torch.version": "2.14.0"}


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(here)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


STRAY: dict[str, Callable[[Path], Any]] = {
    "folder": lambda path: path.mkdir(),
    "FIFO": os.mkfifo,
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "huge file": _huge,
    "empty file": lambda path: path.touch(),
    "text": lambda path: path.write_text("hello"),
    "file nobody may read": lambda path: path.touch(mode=0),
    "file all may write": lambda path: (path.write_text("{}"), path.chmod(0o666)),
}
NAMES = [
    b".DS_Store",
    b"Thumbs.db",
    b"desktop.ini",
    b"\xff\xfe.json",
    "ü.json".encode(),
    b"a b",
    b"x" * 100,
    b"stray.json",
]


def stray_names(folder: Path) -> dict[str, bytes]:
    """What is in a folder, links as such."""
    return {entry.name: os.fsencode(entry.name) for entry in os.scandir(folder)}


@pytest.mark.parametrize("kind", STRAY)
def test_stray_things_among_the_manifests_are_ignored(
    kind: str, local: FolderStore, manifest: Manifest, files: dict[str, Path]
) -> None:
    assert publish(local, manifest, files, None).result == "published"
    folder = local.root / "manifests"
    for name in NAMES:
        STRAY[kind](folder / os.fsdecode(name))
    before = stray_names(folder)
    assert fetch(None, local, manifest.key, manifest.factors, Trust(), 60).result == "hit"
    factors = manifest.factors | STALE
    missed = fetch(None, local, artifact_key(factors), factors, Trust(), 60)
    assert missed.result == "stale", missed.reason
    assert [difference.name for difference in missed.differences] == ["torch.version"]
    assert stray_names(folder) == before


def test_stray_objects_of_a_bucket_are_ignored(
    s3_store: S3Store, local: FolderStore, manifest: Manifest, files: dict[str, Path], signer: Signer, trust: Trust
) -> None:
    assert publish(s3_store, manifest, files, signer).result == "published"
    for name in ("README.md", ".DS_Store", "ü", "a b", "", "readme.txt", "x.json"):
        s3_store.s3.put_object(Bucket=s3_store.bucket, Key=f"{s3_store.prefix}/manifests/{name}", Body=b"stray")
    factors = manifest.factors | STALE
    assert fetch(s3_store, local, artifact_key(factors), factors, trust, 60).result == "stale"


def test_one_hostile_manifest_hides_no_other(
    local: FolderStore, manifest: Manifest, files: dict[str, Path]
) -> None:
    assert publish(local, manifest, files, None).result == "published"
    time.sleep(0.02)
    for index, data in enumerate([b"[" * 100_000, b"{}", b"", canonical_json({"payload": "x"})]):
        local.write(manifest_name(f"{index:064x}"), data)
    factors = manifest.factors | STALE
    assert fetch(None, local, artifact_key(factors), factors, Trust(), 60).result == "stale"


@pytest.mark.parametrize(
    "kind", [kind for kind in STRAY if kind not in ("file all may write", "file nobody may read")]
)
def test_what_has_the_name_of_a_manifest_is_no_hit_and_ends(
    kind: str, local: FolderStore, manifest: Manifest
) -> None:
    (local.root / "manifests").mkdir(mode=0o700)
    STRAY[kind](local.path(manifest_name(manifest.key)))
    fetched = fetch(None, local, manifest.key, manifest.factors, OWNER, 60)
    assert fetched.result == ("error" if kind == "folder" else "corrupt"), fetched.reason
    assert not fetched.reason.startswith("unexpected")


@pytest.mark.parametrize("kind", ["folder", "FIFO", "link to itself", "link to a device", "huge file", "text"])
def test_what_has_the_name_of_a_blob_is_no_hit_and_ends(
    kind: str, local: FolderStore, manifest: Manifest, files: dict[str, Path]
) -> None:
    assert publish(local, manifest, files, None).result == "published"
    path = local.path(blob_name(manifest.entries["blocks.pt2"]))
    path.unlink()
    STRAY[kind](path)
    fetched = fetch(None, local, manifest.key, manifest.factors, OWNER, 60)
    assert fetched.result == ("error" if kind == "folder" else "corrupt"), fetched.reason


def test_a_lock_that_is_a_fifo_holds_nobody_up(local: FolderStore) -> None:
    os.mkfifo(local.root / ".lock")
    with pytest.raises(Exception, match=r"\.lock|store|local"):
        local.write("leases/x", b"", if_absent=True)


@pytest.mark.parametrize("kind", ["folder", "FIFO", "link to a device", "socket"])
def test_only_files_are_opened(kind: str, tmp_path: Path) -> None:
    STRAY[kind](tmp_path / "x")
    for attempt in (open_regular, describe):
        with pytest.raises(NotAFileError, match="not a regular file; remove it"):
            attempt(tmp_path / "x")
