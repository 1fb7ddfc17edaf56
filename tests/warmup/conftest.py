"""Provides artifact stores: folders, and prefixes on the S3 servers of `support/servers/s3_servers.py`."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest
import torch
from botocore.exceptions import ClientError
from botocore.loaders import JSONFileLoader

from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import Manifest, describe_all, new_manifest
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import Signer, Trust, generate_key, load_signer
from snapcap.warmup.artifacts.store import ArtifactStore
from snapcap.warmup.machine.denied import report_denied
from snapcap.warmup.options import ComputeOptions, ModelOptions, S3Options, StartOptions, StoreOptions
from snapcap.warmup.plan.checkpoint import read_checkpoint
from snapcap.warmup.plan.plan import make_plan
from snapcap.warmup.runtime.torch_model import LoadedModel, load_model
from snapcap.warmup.s3.client import client


@pytest.fixture(scope="session", autouse=True)
def aws_described_once() -> Iterator[None]:
    """Has botocore read its description of S3 once for all clients. Each client has a session of its own, and would
    read the description again, which is most of the time that a client takes to make."""
    read = cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: read(path))
        yield


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks: NFS without its lock service, one of FUSE, or a filter of system calls."""

    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    report_denied.cache_clear()


@pytest.fixture
def s3(s3_server: str, aws_environment: None) -> Any:
    """A client of the server, which holds nothing but an empty bucket named ``bucket``."""
    urlopen(Request(f"{s3_server}/moto-api/reset", method="POST")).close()
    opened = client(S3Options(endpoint_url=s3_server))
    opened.create_bucket(Bucket="bucket")
    return opened


@pytest.fixture
def s3_options(request: pytest.FixtureRequest) -> Callable[[str], S3Options]:
    """``s3_options("moto" | "ceph")``: that server, with credentials for it in the environment."""

    def options(server: str) -> S3Options:
        request.getfixturevalue("ceph_environment" if server == "ceph" else "aws_environment")
        address = request.getfixturevalue("ceph_server" if server == "ceph" else "s3_server")
        return S3Options(endpoint_url=address, region="us-east-1")

    return options


@pytest.fixture(scope="session")
def s3_clients() -> dict[tuple[str, ...], Any]:
    """By server and credentials, filled by the tests: a client takes a tenth of a second to make."""
    return {}


@pytest.fixture
def make_s3_store(
    s3_options: Callable[[str], S3Options], s3_clients: dict[tuple[str, ...], Any]
) -> Callable[[str], S3Store]:
    """``make_s3_store("moto" | "ceph")`` -> a store under a prefix of its own."""

    def make(server: str) -> S3Store:
        options = s3_options(server)
        whose = (server, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        if whose not in s3_clients:
            s3_clients[whose] = client(options)
        store = S3Store(s3_clients[whose], "artifacts", f"{uuid4().hex}/deeper")
        try:
            store.s3.head_bucket(Bucket=store.bucket)
        except ClientError:
            store.s3.create_bucket(Bucket=store.bucket)
        return store

    return make


@pytest.fixture
def local(tmp_path: Path) -> FolderStore:
    """An empty local folder."""
    return FolderStore.open(tmp_path / "local")


@pytest.fixture(params=["moto", "ceph"])
def s3_store(request: pytest.FixtureRequest, make_s3_store: Callable[[str], S3Store]) -> S3Store:
    """An empty store on each S3 server."""
    return make_s3_store(request.param)


@pytest.fixture(params=["folder", "moto", "ceph"])
def store(request: pytest.FixtureRequest, tmp_path: Path, make_s3_store: Callable[[str], S3Store]) -> ArtifactStore:
    """An empty store of each kind."""
    return FolderStore.open(tmp_path / "store") if request.param == "folder" else make_s3_store(request.param)


FACTORS: dict[str, Any] = {
    "torch.version": "2.13.0",
    "device.name": "cpu",
    "model.buckets": [1, 4],
    "kind": "aot",
    "format": 1,
}
CONTENTS = {"blocks.pt2": b"blocks" * 1000, "more/head.pt2": b"head", "more/copy.pt2": b"head", "empty": b""}


@pytest.fixture
def factors() -> dict[str, Any]:
    """Those of ``manifest``."""
    return dict(FACTORS)


@pytest.fixture
def contents() -> dict[str, bytes]:
    """What ``files`` holds; two are equal, one is empty."""
    return dict(CONTENTS)


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    """The key ``tmp_path / "key"``, beside which lies the public one, ``key.pub``."""
    generate_key(tmp_path / "key")
    return load_signer(tmp_path / "key")


@pytest.fixture
def trust(tmp_path: Path, signer: Signer) -> Trust:
    """In ``signer`` alone."""
    return Trust.of(StoreOptions(trusted_keys=(tmp_path / "key.pub",)))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """What a build has made."""
    paths = {}
    for name, content in CONTENTS.items():
        paths[name] = tmp_path / "build" / name
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        paths[name].write_bytes(content)
    return paths


@pytest.fixture
def manifest(files: dict[str, Path]) -> Manifest:
    """Of ``files``."""
    return new_manifest("aot", FACTORS, describe_all(files), {"inputs": [1, 2]})


@pytest.fixture
def remote(store: ArtifactStore, manifest: Manifest, files: dict[str, Path], signer: Signer) -> ArtifactStore:
    """Each kind of store, with a signed set."""
    published = publish(store, manifest, files, signer)
    assert published.result == "published", published.reason
    return store


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The demo model in fp32 on the CPU, with slots for four rows."""
    folder = tmp_path_factory.mktemp("cache")
    options = StartOptions(ModelOptions(cache_dir=folder), ComputeOptions("cpu", buckets=(1, 4), threads=1))
    checkpoint = read_checkpoint(options)
    plan = make_plan(checkpoint.config, options)
    cpu = torch.device("cpu")
    return load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, cpu, torch.float32)
