"""Publish, then fetch: a whole and trusted set is a hit, and everything else a labelled failure."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.packs import delete_pack
from support.servers.server_process import reserved_port

from snapcap.warmup.artifacts.fetch import Fetched, fetch
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import ABSENT, Difference, Factors, artifact_key, canonical_json
from snapcap.warmup.artifacts.manifest import Manifest, describe, describe_all, new_manifest, seal, seal_payload
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import OWNER, Signer, Trust, generate_key, load_signer
from snapcap.warmup.artifacts.store import ArtifactStore, StoreError, blob_name, manifest_name
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.download import PART_BYTES


def get(remote: ArtifactStore | None, local: FolderStore, trust: Trust, factors: Factors) -> Fetched:
    return fetch(remote, local, artifact_key(factors), factors, trust, 60)


def assert_hit(fetched: Fetched, manifest: Manifest) -> None:
    assert (fetched.result, fetched.manifest) == ("hit", manifest), fetched.reason
    assert {name: describe(file.path) for name, file in fetched.entries.items()} == manifest.entries


def assert_failed(fetched: Fetched, result: str, *words: str) -> None:
    assert fetched.result == result, fetched.reason
    assert not fetched.entries
    assert fetched.manifest is None
    assert "\n" not in fetched.reason
    assert fetched.reason.startswith("unexpected") == ("surprise" in words)
    for word in words:
        assert word in fetched.reason


def flip(store: ArtifactStore, name: str, position: int) -> None:
    stored = store.read(name, 1 << 20)
    assert stored is not None
    damaged = bytearray(stored.data)
    damaged[position] ^= 1
    store.write(name, bytes(damaged))


def test_a_set_is_fetched_once(remote: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest) -> None:
    first = get(remote, local, trust, manifest.factors)
    assert_hit(first, manifest)
    assert first.bytes_fetched == manifest.total_bytes == 6004  # equal files travel once
    second = get(remote, local, trust, manifest.factors)
    assert_hit(second, manifest)
    assert second.bytes_fetched == 0
    assert_hit(get(None, local, Trust(), manifest.factors), manifest)
    assert all(file.path.is_relative_to(local.root) for file in first.entries.values())


def test_an_empty_store_is_a_miss(
    store: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest
) -> None:
    assert_failed(get(store, local, trust, manifest.factors), "miss", manifest.key[:12], store.location)
    assert_failed(get(None, local, trust, manifest.factors), "miss", local.location)


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({"torch.version": "2.14.0"}, "stale"),
        ({"torch.version": "2.14.0", "triton.version": "3.6"}, "stale"),
        ({"device.name": "another"}, "miss"),
        ({"torch.version": "2.14.0", "model.buckets": [1]}, "miss"),
    ],
)
def test_a_miss_names_the_factors_that_differ(
    remote: ArtifactStore, local: FolderStore, trust: Trust, change: dict[str, Any], result: str, manifest: Manifest
) -> None:
    fetched = get(remote, local, trust, manifest.factors | change)
    assert_failed(fetched, result, *change, "here and")
    expected = [
        Difference(name, value, manifest.factors.get(name, ABSENT)) for name, value in sorted(change.items())
    ]
    assert list(fetched.differences) == expected


def test_sets_of_another_kind_or_of_strangers_explain_nothing(
    remote: ArtifactStore, local: FolderStore, manifest: Manifest
) -> None:
    assert_failed(get(remote, local, OWNER, manifest.factors | {"kind": "jit"}), "miss")
    assert not get(remote, local, OWNER, manifest.factors | {"kind": "jit"}).differences
    assert not get(remote, local, Trust(), manifest.factors | {"torch.version": "1"}).differences


@pytest.mark.parametrize("position", [0, 20, 700, -3])
def test_a_flipped_byte_in_the_manifest(
    remote: ArtifactStore, local: FolderStore, trust: Trust, position: int, manifest: Manifest
) -> None:
    flip(remote, manifest_name(manifest.key), position)
    assert_failed(get(remote, local, trust, manifest.factors), "corrupt", "manifest")


@pytest.mark.parametrize("name", ["blocks.pt2", "more/head.pt2"])
def test_a_flipped_byte_in_a_blob(
    remote: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest, name: str
) -> None:
    blob = manifest.entries[name]
    delete_pack(remote, manifest.entries.values())
    flip(remote, blob_name(blob), blob.size // 2)
    assert_failed(get(remote, local, trust, manifest.factors), "corrupt", blob.digest)
    assert local.read(manifest_name(manifest.key), 10) is None
    assert not (local.path(blob_name(blob))).exists()


def test_a_blob_that_is_missing_or_cut(
    remote: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest, files: dict[str, Path]
) -> None:
    name = blob_name(manifest.entries["blocks.pt2"])
    delete_pack(remote, manifest.entries.values())
    remote.write(name, files["blocks.pt2"].read_bytes()[:-1])
    assert_failed(get(remote, local, trust, manifest.factors), "corrupt", name)
    remote.write(name, files["blocks.pt2"].read_bytes() + b"!")
    assert_failed(get(remote, local, trust, manifest.factors), "corrupt", name)
    remote.delete(name)
    assert_failed(get(remote, local, trust, manifest.factors), "corrupt", name)


def test_a_half_written_upload_is_no_set(
    store: ArtifactStore,
    local: FolderStore,
    trust: Trust,
    manifest: Manifest,
    files: dict[str, Path],
    signer: Signer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload = store.upload

    def fail(name: str, source: Path) -> None:
        if name == blob_name(manifest.entries["more/head.pt2"]):
            raise StoreError("the network is gone")
        upload(name, source)

    with monkeypatch.context() as patching:
        patching.setattr(type(store), "upload", lambda _, *given: fail(*given))
        assert publish(store, manifest, files, signer).result == "error"
    assert store.size(blob_name(manifest.entries["blocks.pt2"])) is not None
    assert_failed(get(store, local, trust, manifest.factors), "miss")


def test_unsigned_and_strangers_are_untrusted(
    remote: ArtifactStore, local: FolderStore, tmp_path: Path, manifest: Manifest, trust: Trust
) -> None:
    generate_key(tmp_path / "stranger")
    remote.write(manifest_name(manifest.key), seal(manifest, None))
    assert_failed(get(remote, local, trust, manifest.factors), "untrusted", "--sign-key")
    remote.write(manifest_name(manifest.key), seal(manifest, load_signer(tmp_path / "stranger")))
    assert_failed(get(remote, local, trust, manifest.factors), "untrusted", "--trusted-key")
    assert not (local.root / "blobs").exists()  # and nothing was downloaded
    assert_hit(get(remote, local, OWNER, manifest.factors), manifest)


@pytest.mark.parametrize("name", ["../../escaped", "a/../../x", "/tmp/escaped"])
def test_a_name_that_leaves_the_folder(
    remote: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest, signer: Signer, name: str
) -> None:
    content = asdict(manifest) | {"entries": {name: asdict(manifest.entries["empty"])}}
    remote.write(manifest_name(manifest.key), seal_payload(canonical_json(content), signer))
    assert_failed(get(remote, local, trust, manifest.factors), "corrupt", "safe name")


def test_a_digest_that_leaves_the_folder(
    remote: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest, signer: Signer
) -> None:
    content = asdict(manifest) | {"entries": {"x": {"digest": "../../" + "a" * 58, "size": 4}}}
    remote.write(manifest_name(manifest.key), seal_payload(canonical_json(content), signer))
    assert_failed(get(remote, local, trust, manifest.factors), "corrupt", "digest")


def test_a_signed_manifest_under_another_key(
    remote: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest
) -> None:
    """Signed, whole, and not what was asked for: an old torch's code must not come in under a new one's name."""
    stored = remote.read(manifest_name(manifest.key), 1 << 20)
    assert stored is not None
    other = manifest.factors | {"torch.version": "2.14.0"}
    remote.write(manifest_name(artifact_key(other)), stored.data)
    assert_failed(get(remote, local, trust, other), "corrupt", manifest.key[:12])


def test_another_format_is_refused(
    remote: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest, signer: Signer
) -> None:
    payload = canonical_json(asdict(manifest) | {"format": 2})
    remote.write(manifest_name(manifest.key), seal_payload(payload, signer))
    assert_failed(get(remote, local, trust, manifest.factors), "corrupt", "format 2")


def test_an_object_that_is_far_too_large_is_not_read(
    store: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest
) -> None:
    store.write(manifest_name(manifest.key), b"x" * (5 << 20))
    assert_failed(get(store, local, trust, manifest.factors), "corrupt", "sensible")


@pytest.mark.parametrize("damage", ["manifest", "blob", "missing blob"])
def test_local_damage_is_repaired_from_the_remote(
    remote: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest, damage: str
) -> None:
    get(remote, local, trust, manifest.factors)
    blob = manifest.entries["blocks.pt2"]
    match damage:
        case "manifest":
            flip(local, manifest_name(manifest.key), 100)
        case "blob":
            flip(local, blob_name(blob), 3000)
        case _:
            local.delete(blob_name(blob))
    again = get(remote, local, trust, manifest.factors)
    assert_hit(again, manifest)
    assert again.bytes_fetched == (0 if damage == "manifest" else blob.size)


def test_local_damage_without_a_remote_makes_room_for_a_build(
    local: FolderStore, manifest: Manifest, files: dict[str, Path]
) -> None:
    assert publish(local, manifest, files, None).result == "published"
    flip(local, blob_name(manifest.entries["blocks.pt2"]), 3000)
    assert_failed(get(None, local, Trust(), manifest.factors), "corrupt", "blocks.pt2")
    assert_failed(get(None, local, Trust(), manifest.factors), "miss")
    assert publish(local, manifest, files, None).result == "published"
    assert_hit(get(None, local, Trust(), manifest.factors), manifest)


def test_local_damage_is_told_when_the_remote_has_nothing(
    store: ArtifactStore, local: FolderStore, trust: Trust, manifest: Manifest, files: dict[str, Path]
) -> None:
    publish(local, manifest, files, None)
    flip(local, manifest_name(manifest.key), 100)
    assert_failed(get(store, local, trust, manifest.factors), "corrupt")


def test_wrong_credentials_are_an_error(
    make_s3_store: Callable[[str], S3Store], local: FolderStore, monkeypatch: pytest.MonkeyPatch, manifest: Manifest
) -> None:
    address = make_s3_store("ceph")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = S3Store.open(address.location, S3Options(endpoint_url=address.s3.meta.endpoint_url, region="us-east-1"))
    assert_failed(get(store, local, OWNER, manifest.factors), "error", "secret key is wrong")


def test_a_missing_bucket_is_an_error(s3_store: S3Store, local: FolderStore, manifest: Manifest) -> None:
    missing = S3Store(s3_store.s3, f"{s3_store.bucket}-not", "")
    assert_failed(get(missing, local, OWNER, manifest.factors), "error", "bucket does not exist")


def test_nobody_listens(aws_environment: None, local: FolderStore, manifest: Manifest) -> None:
    with reserved_port() as nobody:
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        store = S3Store.open("s3://bucket", S3Options(endpoint_url=address, region="us-east-1"))
        assert_failed(get(store, local, OWNER, manifest.factors), "error", "connect")


def test_a_black_hole_is_given_up_at_the_deadline(
    aws_environment: None, local: FolderStore, black_hole: str, manifest: Manifest
) -> None:
    store = S3Store.open("s3://bucket", S3Options(endpoint_url=black_hole, region="us-east-1", read_timeout=60))
    fetched = fetch(store, local, manifest.key, manifest.factors, OWNER, 0.5)
    assert_failed(fetched, "error", "0.5 s", "network")
    assert 0.5 <= fetched.seconds < 20  # and not 60


def test_a_full_or_read_only_folder_is_an_error(
    remote: ArtifactStore, local: FolderStore, trust: Trust, monkeypatch: pytest.MonkeyPatch, manifest: Manifest
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert_failed(get(remote, local, trust, manifest.factors), "error", "No space left")


def test_a_bug_is_an_error_and_not_a_crash(
    local: FolderStore, monkeypatch: pytest.MonkeyPatch, manifest: Manifest
) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(FolderStore, "read", fail)
    assert_failed(get(None, local, OWNER, manifest.factors), "error", "ZeroDivisionError", "surprise")


def test_large_blobs_come_in_ranges(
    store: ArtifactStore, local: FolderStore, trust: Trust, signer: Signer, tmp_path: Path, manifest: Manifest
) -> None:
    content = os.urandom(2 * PART_BYTES + 12_345)
    (tmp_path / "large").write_bytes(content)
    files = {"large": tmp_path / "large"}
    assert (
        publish(store, new_manifest("aot", manifest.factors, describe_all(files)), files, signer).result
        == "published"
    )
    fetched = get(store, local, trust, manifest.factors)
    assert fetched.entries["large"].read() == content
