"""The IAM policies, enforced by a real S3 server: what a server and the builder can do with them, and cannot."""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.manifests import Manifest, environment
from support.checkpoints.published import make_model

from snapcap.warmup.artifacts.download import download_weights
from snapcap.warmup.artifacts.fetch import NotFetchedError, fetch, fetch_model
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.lease import Held, Lease, acquire
from snapcap.warmup.artifacts.manifest import Manifest as ArtifactManifest
from snapcap.warmup.artifacts.manifest import describe_all, new_manifest
from snapcap.warmup.artifacts.publish import publish, publish_model
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import OWNER, Trust, generate_key, load_signer
from snapcap.warmup.artifacts.store import StoreDeniedError, lease_name, manifest_name, model_name
from snapcap.warmup.options import S3Options, StoreOptions
from snapcap.warmup.s3.client import client

POLICIES = Path(__file__).parents[2] / "deploy" / "kubernetes" / "iam"
FACTORS: dict[str, Any] = {"kind": "aot", "format": 1, "device.name": "cpu"}

Grant = Callable[[str], S3Store]


@pytest.fixture
def store(overlays: dict[str, list[Manifest]], ceph_server: str, ceph_environment: None) -> S3Store:
    """The store that the manifests name, as the owner of its bucket, empty."""
    address = environment(overlays["cpu"])["SNAPCAP_STORE"]
    owned = S3Store.open(address, S3Options(endpoint_url=ceph_server, region="us-east-1"))
    if owned.bucket not in {bucket["Name"] for bucket in owned.s3.list_buckets()["Buckets"]}:
        owned.s3.create_bucket(Bucket=owned.bucket)
    for entry in owned.s3.list_objects_v2(Bucket=owned.bucket).get("Contents", ()):
        owned.s3.delete_object(Bucket=owned.bucket, Key=entry["Key"])
    return owned


@pytest.fixture
def grant(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> Grant:
    """``grant("server")`` -> the store as seen by another user, whom that policy is all that is granted."""

    def as_policy_says(name: str) -> S3Store:
        # Ceph has no policies of roles: as the bucket's own, the same statements name the user they are for.
        policy = json.loads((POLICIES / f"{name}.json").read_text())
        for statement in policy["Statement"]:
            statement["Principal"] = {"AWS": ["arn:aws:iam:::user/read"]}
        store.s3.put_bucket_policy(Bucket=store.bucket, Policy=json.dumps(policy))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "readaccess")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "readsecret")
        options = S3Options(endpoint_url=store.s3.meta.endpoint_url, region="us-east-1")
        return S3Store(client(options), store.bucket, store.prefix)

    return as_policy_says


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "head.pt2").write_bytes(b"head" * 1000)
    return {"head.pt2": tmp_path / "head.pt2"}


@pytest.fixture
def artifacts(files: dict[str, Path]) -> ArtifactManifest:
    return new_manifest("aot", FACTORS, describe_all(files))


def test_the_builder_publishes_and_a_server_fetches(
    grant: Grant, artifacts: ArtifactManifest, files: dict[str, Path], tmp_path: Path
) -> None:
    signer = load_signer(generate_key(tmp_path / "key").with_suffix(""))
    trust = Trust.of(StoreOptions(trusted_keys=(tmp_path / "key.pub",)))
    builder = grant("builder")
    assert builder.is_conditional()
    lease = acquire(builder, artifacts.key, 60)
    assert isinstance(lease, Lease)
    assert isinstance(acquire(builder, artifacts.key, 60), Held)
    assert publish(builder, artifacts, files, signer).result == "published"
    assert lease.renew()
    lease.release()
    assert builder.read(lease_name(artifacts.key), 10) is None
    assert publish(builder, artifacts, files, signer).result == "exists"

    model = make_model(tmp_path, 70_000)
    assert publish_model(builder, model, signer, trust).result == "published"
    assert publish_model(builder, model, signer, trust).result == "exists"

    server, local = grant("server"), FolderStore.open(tmp_path / "local")
    assert fetch(server, local, artifacts.key, FACTORS, trust, 60).result == "hit"
    until = time.monotonic() + 60
    found = fetch_model(
        server, local, model.manifest.factors, trust, lambda: model.manifest.model_weights.identity, until
    )
    assert found.manifest == model.manifest
    with ExitStack() as scope:
        assert download_weights(server, local, found.weights, until, scope) == 70_000


def test_what_is_not_there_is_a_miss_for_a_server_and_not_denied(grant: Grant, tmp_path: Path) -> None:
    local, model = FolderStore.open(tmp_path / "local"), make_model(tmp_path, 10)
    with pytest.raises(NotFetchedError) as raised:
        fetch_model(grant("server"), local, model.manifest.factors, OWNER, dict, time.monotonic() + 60)
    assert raised.value.fetched.result == "miss"
    found = fetch(grant("server"), local, "0" * 64, FACTORS, Trust(allow_unsigned=True), 60)
    assert found.result == "miss", found.reason


def test_a_server_cannot_write_and_the_builder_not_delete(
    grant: Grant, store: S3Store, artifacts: ArtifactManifest, files: dict[str, Path]
) -> None:
    store.write(manifest_name(artifacts.key), b"{}")
    server = grant("server")
    for attempt in (
        lambda: server.write(manifest_name(artifacts.key), b""),
        lambda: server.upload("blobs/sha256/" + "0" * 64, files["head.pt2"]),
        lambda: server.write(lease_name(artifacts.key), b""),
        lambda: server.delete(manifest_name(artifacts.key)),
        lambda: server.write(model_name(artifacts.key), b""),
    ):
        with pytest.raises(StoreDeniedError):
            attempt()
    builder = grant("builder")
    with pytest.raises(StoreDeniedError):
        builder.delete(manifest_name(artifacts.key))
    assert store.read(manifest_name(artifacts.key), 10) is not None


@pytest.mark.parametrize("name", ["server", "builder"])
def test_both_read_checkpoints_and_nothing_else(grant: Grant, store: S3Store, name: str) -> None:
    for key in ("checkpoints/mine/config.json", "other/config.json"):
        store.s3.put_object(Bucket=store.bucket, Key=key, Body=b"{}")
    granted = grant(name).s3
    reply = granted.get_object(Bucket=store.bucket, Key="checkpoints/mine/config.json")
    assert reply["Body"].read() == b"{}"
    with pytest.raises(granted.exceptions.ClientError, match="AccessDenied"):
        granted.get_object(Bucket=store.bucket, Key="other/config.json")
    with pytest.raises(granted.exceptions.ClientError, match="AccessDenied"):
        granted.put_object(Bucket=store.bucket, Key="checkpoints/mine/config.json", Body=b"")
