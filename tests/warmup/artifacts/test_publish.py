"""Publishing: a set appears whole or not at all, and once."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.checkpoints.packs import delete_pack

from snapcap.warmup.artifacts.fetch import Fetched, fetch
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import Blob, Manifest, open_envelope, seal
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import OWNER, Signer, Trust
from snapcap.warmup.artifacts.store import ArtifactStore, blob_name, manifest_name
from snapcap.warmup.options import S3Options


def get(store: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest) -> Fetched:
    return fetch(store, local, manifest.key, manifest.factors, trust, 60)


def test_publishing_again_changes_nothing(
    remote: ArtifactStore, manifest: Manifest, files: dict[str, Path], signer: Signer
) -> None:
    before = remote.read(manifest_name(manifest.key), 1 << 20)
    later = replace(manifest, created="2030-01-01T00:00:00+00:00")
    assert publish(remote, later, files, signer).result == "exists"
    assert remote.read(manifest_name(manifest.key), 1 << 20) == before


def test_one_of_many_publishers_is_seen(
    store: ArtifactStore, manifest: Manifest, files: dict[str, Path], signer: Signer, trust: Trust
) -> None:
    barrier = threading.Barrier(3)
    results: list[str] = []

    def build(index: int) -> None:
        barrier.wait(60)
        own = replace(manifest, created=f"203{index}-01-01T00:00:00+00:00")
        results.append(publish(store, own, files, signer).result)

    threads = [threading.Thread(target=build, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["exists", "exists", "published"]


def test_a_corrupt_set_can_be_replaced(
    remote: ArtifactStore,
    local: FolderStore,
    manifest: Manifest,
    files: dict[str, Path],
    signer: Signer,
    trust: Trust,
) -> None:
    delete_pack(remote, manifest.entries.values())
    remote.write(blob_name(manifest.entries["blocks.pt2"]), b"damage" * 1000)
    assert get(remote, local, trust, manifest).result == "corrupt"
    assert publish(remote, manifest, files, signer, replace=True).result == "published"
    assert get(remote, local, trust, manifest).result == "hit"


def test_files_that_changed_are_not_published(
    store: ArtifactStore,
    local: FolderStore,
    manifest: Manifest,
    files: dict[str, Path],
    trust: Trust,
    signer: Signer,
) -> None:
    files["blocks.pt2"].write_bytes(b"other" + files["blocks.pt2"].read_bytes()[5:])
    published = publish(store, manifest, files, signer)
    assert published.result == "error"
    assert "blocks.pt2" in published.reason
    assert get(store, local, trust, manifest).result == "miss"


def test_nothing_unsafe_is_published(store: ArtifactStore, manifest: Manifest, files: dict[str, Path]) -> None:
    bad = replace(manifest, entries={"../x": Blob("a" * 64, 1)})
    assert publish(store, bad, files, None).result == "error"
    assert store.newest("manifests", 10) == []


def test_who_may_not_write_is_told(
    make_s3_store: Callable[[str], S3Store],
    manifest: Manifest,
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = make_s3_store("ceph")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "readaccess")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "readsecret")
    store = S3Store.open(address.location, S3Options(endpoint_url=address.s3.meta.endpoint_url, region="us-east-1"))
    published = publish(store, manifest, files, None)
    assert published.result == "denied"
    assert "access is denied" in published.reason


def test_a_manifest_describes_its_files(manifest: Manifest) -> None:
    assert manifest.entries["more/head.pt2"] == manifest.entries["more/copy.pt2"]
    assert open_envelope(seal(manifest, None), OWNER) == manifest
    assert datetime.now(UTC) - datetime.fromisoformat(manifest.created) < timedelta(hours=1)
