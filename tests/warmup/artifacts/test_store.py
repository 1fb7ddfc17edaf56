"""What every store promises: a folder, moto and a real Ceph RGW."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import Blob
from snapcap.warmup.artifacts.remote import S3Store, open_store
from snapcap.warmup.artifacts.signing import OWNER, Trust
from snapcap.warmup.artifacts.store import (
    ArtifactStore,
    DamagedError,
    StoreDeniedError,
    StoreError,
    StoreRefusedError,
    blob_name,
    lease_name,
    manifest_name,
)
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.download import PART_BYTES

NAME = "manifests/x.json"


def soon() -> float:
    return time.monotonic() + 60


def test_what_is_written_is_read(store: ArtifactStore) -> None:
    assert store.read(NAME, 100) is None
    assert store.size(NAME) is None
    version = store.write(NAME, b"one")
    stored = store.read(NAME, 100)
    assert stored is not None
    assert (stored.data, stored.version) == (b"one", version)
    assert store.size(NAME) == 3
    assert store.write(NAME, b"two") != version
    store.delete(NAME)
    store.delete(NAME)
    assert store.read(NAME, 100) is None


def test_a_read_is_bounded(store: ArtifactStore) -> None:
    store.write(NAME, b"x" * 1000)
    stored = store.read(NAME, 10)
    assert stored is not None
    assert stored.data == b"x" * 11


def test_conditions_hold(store: ArtifactStore) -> None:
    assert store.is_conditional()
    assert store.write(NAME, b"none yet", if_version="0" * 32) is None
    version = store.write(NAME, b"first", if_absent=True)
    assert version
    assert store.write(NAME, b"late", if_absent=True) is None
    assert store.write(NAME, b"wrong", if_version="0" * 32) is None
    newer = store.write(NAME, b"second", if_version=version)
    assert newer
    assert store.write(NAME, b"stale", if_version=version) is None
    stored = store.read(NAME, 100)
    assert stored is not None
    assert (stored.data, stored.version) == (b"second", newer)


def test_one_of_many_writers_wins(store: ArtifactStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        contents = [b"%d" % index for index in range(8)]
        won = [bool(version) for version in pool.map(lambda c: store.write(NAME, c, if_absent=True), contents)]
    assert won.count(True) == 1
    stored = store.read(NAME, 100)
    assert stored is not None
    assert stored.data == contents[won.index(True)]


def test_the_canary_leaves_nothing(store: ArtifactStore) -> None:
    assert store.is_conditional()
    assert store.newest("leases", 10) == []


def test_newest_comes_first(store: ArtifactStore, request: pytest.FixtureRequest) -> None:
    resolution = 1.0 if request.node.callspec.params["store"] == "moto" else 0.01  # seconds, of the server's clock
    assert store.newest("manifests", 10) == []
    for index in range(3):
        store.write(f"manifests/{index}.json", b"x")
        time.sleep(resolution)
    store.write("manifests2/y.json", b"x")
    store.write("manifests/deeper/y.json", b"x")
    assert store.newest("manifests", 10) == [f"manifests/{index}.json" for index in (2, 1, 0)]
    assert store.newest("manifests", 2) == ["manifests/2.json", "manifests/1.json"]


def test_files_travel_whole(store: ArtifactStore, tmp_path: Path) -> None:
    contents = {f"blobs/sha256/{size}": os.urandom(size) for size in (0, 1, 70_000, PART_BYTES + 5)}
    for name, content in contents.items():
        (tmp_path / "source").write_bytes(content)
        store.upload(name, tmp_path / "source")
        store.upload(name, tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    sizes = {name: len(content) for name, content in contents.items()}
    arrived = {name: path.read_bytes() for name, path in store.download(sizes, target, soon())}
    assert arrived == contents


def test_missing_and_cut_objects_are_damage(store: ArtifactStore, tmp_path: Path) -> None:
    store.write("blobs/sha256/a", b"12345")
    for sizes in ({"blobs/sha256/none": 5}, {"blobs/sha256/a": 6}, {"blobs/sha256/a": 4}):
        with pytest.raises(DamagedError, match=next(iter(sizes))):
            list(store.download(sizes, tmp_path, soon()))


def test_a_deadline_ends_a_download(store: ArtifactStore, tmp_path: Path) -> None:
    store.write("blobs/sha256/a", b"12345")
    with pytest.raises(StoreError, match="deadline"):
        list(store.download({"blobs/sha256/a": 5}, tmp_path, time.monotonic() - 1))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../b", ".lock", "", "a//b"])
def test_names_stay_inside(store: ArtifactStore, name: str) -> None:
    for attempt in (lambda: store.read(name, 1), lambda: store.write(name, b""), lambda: store.delete(name)):
        with pytest.raises(ValueError, match="not an object name"):
            attempt()


def test_layout() -> None:
    key = "a1" * 32
    assert manifest_name(key) == f"manifests/{key}.json"
    assert lease_name(key) == f"leases/{key}.json"
    assert blob_name(Blob(key, 1)) == f"blobs/sha256/{key}"
    for bad in ("../" + "a" * 61, "a" * 63, "A" * 64, ""):
        with pytest.raises(ValueError, match="not a SHA-256"):
            manifest_name(bad)
        with pytest.raises(ValueError, match="not a SHA-256"):
            blob_name(Blob(bad, 1))


def test_a_store_that_ignores_conditions_is_found_out(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = s3_store.s3.put_object
    monkeypatch.setattr(
        s3_store.s3,
        "put_object",
        lambda IfNoneMatch="", IfMatch="", **request: real(**request),  # noqa: N803
    )
    assert not s3_store.is_conditional()
    assert s3_store.newest("leases", 10) == []


@pytest.mark.parametrize("ignored", ["IfNoneMatch", "IfMatch"])
def test_a_store_that_ignores_one_condition_is_found_out(
    s3_store: S3Store, ignored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = s3_store.s3.put_object
    monkeypatch.setattr(
        s3_store.s3,
        "put_object",
        lambda **request: real(**{name: value for name, value in request.items() if name != ignored}),
    )
    assert not s3_store.is_conditional()


def test_the_canary_flies_once(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert s3_store.is_conditional()
    monkeypatch.setattr(s3_store.s3, "put_object", None)
    assert s3_store.is_conditional()


def test_wrong_credentials_are_denied(make_s3_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = make_s3_store("ceph")
    options = S3Options(endpoint_url=good.s3.meta.endpoint_url, region="us-east-1")
    for variable, advice in (("AWS_ACCESS_KEY_ID", "access key"), ("AWS_SECRET_ACCESS_KEY", "secret key")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "wrong")
            store = S3Store.open(good.location, options)
            for attempt in (
                lambda s=store: s.read(NAME, 1),
                lambda s=store: s.write(NAME, b""),
                store.is_conditional,
            ):
                with pytest.raises(StoreDeniedError, match=advice):
                    attempt()


def test_a_reader_is_denied_writing(make_s3_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = replace(make_s3_store("ceph"), bucket="read-only")
    owner.s3.create_bucket(Bucket=owner.bucket)
    owner.write(NAME, b"x")
    owner.s3.put_bucket_policy(
        Bucket=owner.bucket,
        Policy='{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": {"AWS": '
        '["arn:aws:iam:::user/read"]}, "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": '
        f'["arn:aws:s3:::{owner.bucket}", "arn:aws:s3:::{owner.bucket}/*"]}}]}}',
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "readaccess")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "readsecret")
    reader = S3Store.open(owner.location, S3Options(endpoint_url=owner.s3.meta.endpoint_url, region="us-east-1"))
    assert reader.read(NAME, 10) is not None
    assert reader.read("manifests/none.json", 10) is None
    with pytest.raises(StoreDeniedError):
        reader.is_conditional()


def test_a_missing_bucket_is_named(s3_store: S3Store) -> None:
    missing = S3Store(s3_store.s3, f"{s3_store.bucket}-not", "p")
    for attempt in (lambda: missing.read(NAME, 1), lambda: missing.write(NAME, b""), missing.is_conditional):
        with pytest.raises(StoreError, match="bucket does not exist"):
            attempt()


def test_addresses_open_their_store(tmp_path: Path, aws_environment: None) -> None:
    options = S3Options(endpoint_url="http://127.0.0.1:1")
    assert isinstance(open_store(str(tmp_path / "x"), options, Trust()), FolderStore)
    store = open_store("s3://bucket/prefix/", options, OWNER)
    assert isinstance(store, S3Store)
    assert store.location == "s3://bucket/prefix"
    with pytest.raises(StoreRefusedError, match="--trusted-key"):
        open_store("s3://bucket/prefix", options, Trust())
    for address in ("gs://bucket", "S3://bucket", "https://host/path"):
        with pytest.raises(StoreRefusedError, match="s3://bucket/prefix"):
            open_store(address, options, OWNER)
    with pytest.raises(StoreRefusedError):
        open_store("s3:///prefix", options, OWNER)
