"""Packs: a set comes in one request where it can, and never less right than file by file."""

import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.manifest import Blob, Manifest
from snapcap.warmup.artifacts.signing import Signer, Trust
from snapcap.warmup.s3.download import PART_BYTES
from snapcap.warmup.store import packs
from snapcap.warmup.store.fetch import Fetched, fetch
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.packs import Pack
from snapcap.warmup.store.publish import publish
from snapcap.warmup.store.s3 import S3Store
from snapcap.warmup.store.store import StoreDeniedError, blob_name

Get = Callable[[], Fetched]


@pytest.fixture
def published(s3_store: S3Store, manifest: Manifest, files: dict[str, Path], signer: Signer) -> S3Store:
    assert publish(s3_store, manifest, files, signer).result == "published"
    return s3_store


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the objects that are downloaded."""
    names: list[str] = []
    download = S3Store.download

    def watched(store: S3Store, sizes: Any, *rest: Any) -> Any:
        names.extend(sizes)
        return download(store, sizes, *rest)

    monkeypatch.setattr(S3Store, "download", watched)
    return names


@pytest.fixture
def pack(manifest: Manifest) -> Pack:
    of = Pack.of(manifest.entries.values())
    assert of is not None
    return of


@pytest.fixture
def get(published: S3Store, local: FolderStore, manifest: Manifest, trust: Trust) -> Get:
    """Fetches the set that is published."""
    return lambda: fetch(published, local, manifest.key, manifest.factors, trust, 60)


def blobs_of(contents: Iterable[bytes]) -> list[Blob]:
    return [Blob(hashlib.sha256(content).hexdigest(), len(content)) for content in contents]


def assert_whole(fetched: Fetched, contents: dict[str, bytes]) -> None:
    assert fetched.result == "hit", fetched.reason
    assert {name: entry.read() for name, entry in fetched.entries.items()} == contents


def test_a_set_comes_in_one_object(
    get: Get, pack: Pack, manifest: Manifest, asked: list[str], contents: dict[str, bytes]
) -> None:
    fetched = get()
    assert_whole(fetched, contents)
    assert asked == [pack.name]
    assert fetched.bytes_fetched == manifest.total_bytes


@pytest.mark.parametrize("damage", ["missing", "denied", "shorter", "longer", "one file", "all"])
def test_without_a_right_pack_files_come_one_by_one(
    damage: str,
    published: S3Store,
    get: Get,
    pack: Pack,
    manifest: Manifest,
    asked: list[str],
    contents: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = published.read(pack.name, 1 << 20)
    assert stored is not None
    damaged = manifest.entries["blocks.pt2"]
    start = sum(blob.size for blob in pack.blobs[: pack.blobs.index(damaged)])
    match damage:
        case "missing":
            published.delete(pack.name)
        case "denied":
            download = S3Store.download

            def denied(store: S3Store, sizes: Any, *rest: Any) -> Any:
                if pack.name in sizes:
                    asked.extend(sizes)
                    raise StoreDeniedError("access is denied")
                return download(store, sizes, *rest)

            monkeypatch.setattr(S3Store, "download", denied)
        case "shorter":
            published.write(pack.name, stored.data[:-1])
        case "longer":
            published.write(pack.name, stored.data + b"!")
        case "one file":
            published.write(pack.name, stored.data[:start] + b"!" + stored.data[start + 1 :])
        case _:
            published.write(pack.name, b"!" * len(stored.data))
    with caplog.at_level(logging.INFO, "snapcap.store"):
        fetched = get()
    assert_whole(fetched, contents)
    assert fetched.bytes_fetched == manifest.total_bytes
    one_by_one = {blob_name(blob) for blob in pack.blobs if blob.size}
    if damage == "one file":
        one_by_one = {blob_name(damaged)}
    assert set(asked) - {blob_name(Blob(hashlib.sha256().hexdigest(), 0))} == {pack.name} | one_by_one
    assert ("one by one" in caplog.text) is (damage in ("missing", "denied", "shorter", "longer"))


def test_a_file_that_is_wrong_in_both_is_no_hit(
    published: S3Store, local: FolderStore, get: Get, pack: Pack, manifest: Manifest
) -> None:
    blob = manifest.entries["blocks.pt2"]
    published.write(pack.name, b"!" * pack.size)
    published.write(blob_name(blob), b"!" * blob.size)
    fetched = get()
    assert fetched.result == "corrupt"
    assert blob.digest in fetched.reason
    assert not local.path(blob_name(blob)).exists()


def test_what_is_here_already_is_not_brought_again(
    local: FolderStore, get: Get, manifest: Manifest, asked: list[str]
) -> None:
    get()
    blob = manifest.entries["blocks.pt2"]
    local.delete(blob_name(blob))
    asked.clear()
    assert get().bytes_fetched == blob.size
    assert asked == [blob_name(blob)]


def test_a_replaced_set_has_a_right_pack_again(
    published: S3Store, pack: Pack, manifest: Manifest, files: dict[str, Path], signer: Signer
) -> None:
    before = published.read(pack.name, 1 << 20)
    published.write(pack.name, b"!" * pack.size)
    assert publish(published, manifest, files, signer, replace=True).result == "published"
    after = published.read(pack.name, 1 << 20)
    assert before is not None
    assert after is not None
    assert before.data == after.data


def test_a_folder_has_no_pack(local: FolderStore, manifest: Manifest, files: dict[str, Path]) -> None:
    assert publish(local, manifest, files, None).result == "published"
    assert not local.path("blobs/packs").exists()


def test_a_disk_that_is_full_is_an_error(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    fetched = get()
    assert (fetched.result, "No space left" in fetched.reason) == ("error", True)


def test_only_what_spares_requests_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, empty = blobs_of([b"one", b"other", b""])
    large = Blob("f" * 64, PART_BYTES + 1)
    assert Pack.of([]) is None
    assert Pack.of([one, one, large]) is None
    pack = Pack.of([one, other, large, empty, other])
    assert pack is not None
    assert set(pack.blobs) == {one, other, empty}
    assert pack.size == 8
    same = Pack.of([empty, other, one])
    assert same is not None
    assert same.name == pack.name
    more = Pack.of([one, other])
    assert more is not None
    assert more.name != pack.name
    monkeypatch.setattr(packs, "_MOST_BYTES", 7)
    assert Pack.of([one, other]) is None
