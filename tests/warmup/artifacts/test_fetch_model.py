"""A published model is found when it is signed, whole and of the revision that is meant; else it says why not."""

import base64
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.packs import delete_pack
from support.checkpoints.published import FACTORS, IDENTITY

from snapcap.warmup.artifacts.fetch import (
    Described,
    Found,
    NotFetchedError,
    described,
    fetch,
    fetch_model,
    local_model,
    local_weights,
)
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import artifact_key
from snapcap.warmup.artifacts.manifest import Manifest, ManifestError, seal, seal_payload
from snapcap.warmup.artifacts.publish import ModelFiles, publish_model
from snapcap.warmup.artifacts.signing import OWNER, Signer, Trust, generate_key, load_signer
from snapcap.warmup.artifacts.store import ArtifactStore, blob_name, manifest_name, model_name
from snapcap.warmup.checkpoints.local import CheckpointError
from snapcap.warmup.options import StoreOptions

FAR = time.monotonic() + 1e6

Put = Callable[..., Manifest]


def find(
    remote: ArtifactStore | None, local: FolderStore, trust: Trust, identity: Any = None, **factors: str
) -> Found:
    return fetch_model(remote, local, {**FACTORS, **factors}, trust, lambda: identity or IDENTITY, FAR)


def failed(*given: Any, **more: Any) -> tuple[str, str]:
    with pytest.raises(NotFetchedError) as raised:
        find(*given, **more)
    assert "\n" not in str(raised.value)
    return raised.value.fetched.result, str(raised.value)


def test_it_is_brought_with_its_small_files(
    store: ArtifactStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust
) -> None:
    manifest = put(store, small)
    found = find(store, local, trust)
    assert found == Found(manifest, vouched=False)
    folder = described(local, manifest)
    assert folder is not None
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: path.read_bytes() for name, path in small.files.items()
    }
    assert local_weights(local, found) is None
    assert local_model(local, manifest.key, trust) == Described(found, folder), "verified again, by who starts"


def test_a_second_publication_writes_nothing(
    s3_store: ArtifactStore, small: ModelFiles, put: Put, signer: Signer, trust: Trust, tmp_path: Path
) -> None:
    put(s3_store, small)
    before = s3_store.read(model_name(small.manifest.key), 1 << 20)
    later = replace(small, manifest=replace(small.manifest, created="2027-01-01T00:00:00+00:00"))
    assert publish_model(s3_store, later, signer, trust).result == "exists"
    assert s3_store.read(model_name(small.manifest.key), 1 << 20) == before
    other = replace(small.manifest.model_weights, identity={"config.json": '"2" 2'})
    changed = replace(small, manifest=replace(small.manifest, weights=other))
    assert publish_model(s3_store, changed, signer, trust).result == "published"
    generate_key(tmp_path / "other")
    strange = Trust.of(StoreOptions(trusted_keys=(tmp_path / "other.pub",)))
    assert publish_model(s3_store, changed, load_signer(tmp_path / "other"), strange).result == "published"
    s3_store.delete(blob_name(small.manifest.model_weights.file))
    assert publish_model(s3_store, small, signer, trust).result == "published"
    assert s3_store.size(blob_name(small.manifest.model_weights.file)) == small.manifest.model_weights.size


def test_what_was_never_published_is_a_miss(shop: FolderStore, local: FolderStore, trust: Trust) -> None:
    assert failed(shop, local, trust)[0] == "miss"
    assert failed(None, local, trust)[0] == "miss"


def test_another_revision_is_a_miss(
    shop: FolderStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust
) -> None:
    put(shop, small)
    for identity in (
        {**IDENTITY, "model.safetensors": '"4567" 4'},
        {**IDENTITY, "more": "1"},
        {"commit": "0" * 40},
    ):
        result, reason = failed(shop, local, trust, identity=identity)
        assert (result, "another revision" in reason) == ("miss", True)


def test_a_new_publication_takes_the_place_of_what_is_cached(
    shop: FolderStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust
) -> None:
    put(shop, small)
    find(shop, local, trust)
    newer = {**IDENTITY, "model.safetensors": '"4567" 4'}
    put(shop, small, identity=newer, checkpoint="cd" * 32)
    assert find(shop, local, trust).weights.checkpoint == "ab" * 32, "the source is still what it was"
    assert find(shop, local, trust, identity=newer).weights.checkpoint == "cd" * 32


def test_a_source_that_does_not_say_its_revision_is_an_error(
    shop: FolderStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust
) -> None:
    put(shop, small)

    def identify() -> Any:
        raise CheckpointError("s3://bucket/x: access is denied")

    with pytest.raises(NotFetchedError, match="access is denied") as raised:
        fetch_model(shop, local, FACTORS, trust, identify, FAR)
    assert raised.value.fetched.result == "error"


@pytest.mark.parametrize("kind", ["denied", "silent"])
def test_a_model_that_is_here_as_a_whole_is_used_where_its_source_does_not_answer(
    kind: str, local: FolderStore, model: ModelFiles, put: Put, trust: Trust
) -> None:
    put(local, model)
    find(None, local, trust)
    over = threading.Event()

    def identify() -> Any:
        if kind == "silent":
            over.wait(60)
        raise CheckpointError("s3://bucket/x: access is denied")

    class Down:
        location = "s3://bucket/store"

    try:
        remote: Any = Down()  # which is not asked
        seconds = 1.0 if kind == "silent" else 60.0
        found = fetch_model(remote, local, FACTORS, trust, identify, time.monotonic() + seconds)
    finally:
        over.set()
    assert found.weights.identity == IDENTITY
    assert ("access is denied" if kind == "denied" else "no answer within") in found.unasked
    path = local.path(local_weights(local, found) or "")
    path.unlink()
    with pytest.raises(NotFetchedError, match="access is denied"):
        fetch_model(remote, local, FACTORS, trust, identify, time.monotonic() + 60)


def test_strangers_and_nobody_are_untrusted(
    shop: FolderStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust, tmp_path: Path
) -> None:
    generate_key(tmp_path / "stranger")
    put(shop, small, by=load_signer(tmp_path / "stranger"))
    assert failed(shop, local, trust)[0] == "untrusted"
    put(shop, small, by=None)
    assert failed(shop, local, trust)[0] == "untrusted"
    assert not (local.root / "models").exists(), "nothing of it is kept"
    assert find(shop, local, OWNER).manifest == small.manifest


def test_a_revoked_key_is_no_hit_in_a_warm_cache(
    shop: FolderStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust, tmp_path: Path
) -> None:
    put(shop, small)
    find(shop, local, trust)
    generate_key(tmp_path / "new")
    assert failed(shop, local, Trust.of(StoreOptions(trusted_keys=(tmp_path / "new.pub",))))[0] == "untrusted"
    assert failed(None, local, Trust.of(StoreOptions(trusted_keys=(tmp_path / "new.pub",))))[0] == "untrusted"


def test_weights_that_are_too_old_are_refused(
    shop: FolderStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust
) -> None:
    put(shop, small)
    find(shop, local, trust)
    later = replace(trust, min_built="9999-01-01T00:00:00+00:00")
    for store in (shop, None):
        result, reason = failed(store, local, later)
        assert (result, "before --min-built 9999-01-01" in reason) == ("untrusted", True)


def test_the_manifest_of_another_model_is_refused(
    shop: FolderStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust
) -> None:
    """Signed and whole, and put under the name of the one that is asked for."""
    manifest = put(shop, small)
    stored = shop.read(model_name(manifest.key), 1 << 20)
    assert stored is not None
    other = {**FACTORS, "model.source": "s3://bucket/other"}
    shop.write(model_name(artifact_key(other)), stored.data)
    result, reason = failed(shop, local, trust, **{"model.source": "s3://bucket/other"})
    assert (result, "is that of key" in reason) == ("corrupt", True)


@pytest.mark.parametrize("damage", ["manifest", "small file", "missing file"])
def test_damage_in_the_store_is_named(
    damage: str, store: ArtifactStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust
) -> None:
    manifest = put(store, small)
    blob = blob_name(manifest.entries["tokenizer.json"])
    delete_pack(store, manifest.entries.values())
    match damage:
        case "manifest":
            stored = store.read(model_name(manifest.key), 1 << 20)
            assert stored is not None
            store.write(model_name(manifest.key), stored.data.replace(b"a", b"b", 1))
        case "small file":
            store.write(blob, b"?" * manifest.entries["tokenizer.json"].size)
        case _:
            store.delete(blob)
    assert failed(store, local, trust)[0] == "corrupt"


@pytest.mark.parametrize("damage", ["manifest", "file", "missing file", "link"])
def test_damage_here_is_mended_from_the_store(
    damage: str, shop: FolderStore, local: FolderStore, small: ModelFiles, put: Put, trust: Trust, tmp_path: Path
) -> None:
    manifest = put(shop, small)
    find(shop, local, trust)
    folder = described(local, manifest)
    assert folder is not None
    file = folder / "tokenizer.json"
    match damage:
        case "manifest":
            local.path(model_name(manifest.key)).write_bytes(b"{}")
        case "file":
            file.write_bytes(b"?" * file.stat().st_size)
        case "link":
            (tmp_path / "victim").write_bytes(file.read_bytes())
            file.unlink()
            file.symlink_to(tmp_path / "victim")
        case _:
            file.unlink()
    assert find(shop, local, trust).manifest == manifest
    assert described(local, manifest) is not None
    assert not file.is_symlink()


def test_in_a_folder_the_owners_weights_are_used_where_they_lie(
    local: FolderStore, small: ModelFiles, put: Put, trust: Trust
) -> None:
    manifest = put(local, small)
    found = find(None, local, trust)
    assert found.vouched
    assert local_weights(local, found) == blob_name(manifest.model_weights.file)
    os.truncate(local.path(blob_name(manifest.model_weights.file)), 10)
    assert local_weights(local, found) is None


def test_what_was_copied_into_a_folder_is_signed_but_not_vouched_for(
    local: FolderStore, shop: FolderStore, small: ModelFiles, put: Put, trust: Trust
) -> None:
    """As by a copy of a bucket: the weights are verified by whoever uses them first."""
    manifest = put(shop, small)
    for path in shop.root.rglob("*"):
        if path.is_file() and "built" not in path.parts:
            local.write(str(path.relative_to(shop.root)), path.read_bytes())
    found = find(None, local, trust)
    assert (found.manifest, found.vouched) == (manifest, False)
    assert local_weights(local, found) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"entries": {"../../escaped": {"digest": "0" * 64, "size": 1}}}, "config.json"),
        ({"entries": {"config.json": 0, "../x": 0}}, "safe name"),
        ({"entries": {"config.json": 0, ".hidden": 0}}, "safe name"),
        ({"entries": {"config.json": 0, "a/b": 0}}, "safe name"),
        ({"entries": {"config.json": {"digest": "../" + "0" * 61, "size": 1}}}, "digest"),
        ({"entries": {"config.json": {"digest": "0" * 64, "size": 1 << 40}}}, "digest"),
        ({"entries": {"config.json": {"digest": "0" * 64, "size": 1 << 28}}}, "more than is sensible"),
        ({"file": {"digest": "0" * 64, "size": 1 << 60}}, "digest"),
        ({"file": {"digest": "0" * 64, "size": -1}}, "digest"),
        ({"file": {"digest": "0" * 64, "size": True}}, "digest"),
        ({"file": {"digest": "0" * 64, "size": 0}}, "0 bytes"),
        ({"file": {"digest": "0" * 64, "size": 1 << 30}}, "number of chunks"),
        ({"chunks": ["0" * 63]}, "chunks"),
        ({"chunks": [7]}, "chunks"),
        ({"chunks": {}}, "chunks"),
        ({"identity": {}}, "identity"),
        ({"identity": {"commit": 3}}, "identity"),
        ({"identity": {"a\nb": "c"}}, "identity"),
        ({"checkpoint": "x"}, "checkpoint"),
        ({"key": "0" * 64}, "key is not that"),
        ({"format": 2}, "format 2"),
        ({"format": True}, "format True"),
        ({"surplus": 1}, "unknown or missing fields"),
        ({"created": "yesterday"}, "created"),
    ],
)
def test_what_a_manifest_may_not_say(
    changes: dict[str, Any],
    said: str,
    shop: FolderStore,
    local: FolderStore,
    small: ModelFiles,
    put: Put,
    signer: Signer,
    trust: Trust,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Signed by who is trusted: a mistake there, or a stolen key, leaves no folder and fills no disk."""
    put(shop, small)
    stored = shop.read(model_name(small.manifest.key), 1 << 20)
    assert stored is not None
    payload = json.loads(base64.b64decode(json.loads(stored.data)["payload"]))
    own = payload["entries"]["config.json"]
    if isinstance(changes.get("entries"), dict):
        changes = {"entries": {name: own if blob == 0 else blob for name, blob in changes["entries"].items()}}
    if changes.keys() <= payload["weights"].keys():
        changes = {"weights": {**payload["weights"], **changes}}
    sealed = seal_payload(json.dumps({**payload, **changes}).encode(), signer)
    shop.write(model_name(small.manifest.key), sealed)
    result, reason = failed(shop, local, trust)
    assert (result, said in reason) == ("corrupt", True), reason
    assert not (local.root / "models").exists()


def test_a_set_of_packages_is_no_model_and_a_model_no_set(
    shop: FolderStore, local: FolderStore, small: ModelFiles, signer: Signer, trust: Trust, manifest: Manifest
) -> None:
    """A manifest of packages is under a model's name, and a model's under that of packages. Both have a trusted
    signature."""
    shop.write(model_name(small.manifest.key), seal(manifest, signer))
    assert failed(shop, local, trust)[0] == "corrupt"
    shop.write(manifest_name(manifest.key), seal(small.manifest, signer))
    assert fetch(shop, local, manifest.key, manifest.factors, trust, 60).result == "corrupt"
    with pytest.raises(ManifestError, match="of another kind"):
        seal(replace(small.manifest, kind="aot", weights=None), signer)
    with pytest.raises(ManifestError, match="is not that of a model"):
        _ = manifest.model_weights
