"""Real S3 servers for the tests of this folder, and the artifact stores on them."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer

from warmup.folder_store import FolderStore
from warmup.manifest import Manifest
from warmup.publish import new_manifest, publish
from warmup.s3 import S3Options, client
from warmup.s3_store import S3Store
from warmup.signing import Signer, Trust, generate_key, load_signer
from warmup.store import ArtifactStore

CEPH = Path(__file__).parent.parent / "support" / "ceph.sh"


@pytest.fixture
def aws_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of nobody, and nothing of the machine's own AWS configuration."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of moto's S3; it accepts any credentials."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def s3(s3_server: str, aws_environment: None) -> Any:
    """A client of the server, which holds nothing but an empty bucket named ``bucket``."""
    urlopen(Request(f"{s3_server}/moto-api/reset", method="POST")).close()
    opened = client(S3Options(endpoint_url=s3_server))
    opened.create_bucket(Bucket="bucket")
    return opened


@pytest.fixture
def black_hole() -> Iterator[str]:
    """Accepts connections, reads nothing, answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="session")
def ceph_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ceph RGW, which checks credentials; see the users in ceph.sh."""
    if not all(map(shutil.which, ("radosgw", "ceph-mon", "ceph-osd"))):
        pytest.skip(
            "CEPH IS NOT INSTALLED: apt-get install radosgw ceph-mon ceph-osd TO TEST AGAINST A REAL S3 SERVER"
        )
    folder = str(tmp_path_factory.mktemp("ceph"))
    port, monitor_port = map(str, _free_ports(2))
    try:
        # Not captured: the daemons would keep the pipe open.
        subprocess.run([CEPH, "start", folder, port, monitor_port], check=True, timeout=200)
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([CEPH, "stop", folder], check=True, timeout=60)


@pytest.fixture
def ceph_environment(aws_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials of the user that owns every bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testaccess")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")


@pytest.fixture
def s3_options(request: pytest.FixtureRequest) -> Callable[[str], S3Options]:
    """``s3_options("moto" | "ceph")``: that server, with credentials for it in the environment."""

    def options(server: str) -> S3Options:
        request.getfixturevalue("ceph_environment" if server == "ceph" else "aws_environment")
        address = request.getfixturevalue("ceph_server" if server == "ceph" else "s3_server")
        return S3Options(endpoint_url=address, region="us-east-1")

    return options


@pytest.fixture
def make_s3_store(s3_options: Callable[[str], S3Options]) -> Callable[[str], S3Store]:
    """``make_s3_store("moto" | "ceph")`` -> a store under a prefix of its own."""

    def make(server: str) -> S3Store:
        store = S3Store.open(f"s3://artifacts/{uuid4().hex}/deeper", s3_options(server))
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
    return Trust.from_files([tmp_path / "key.pub"])


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
    return new_manifest("aot", FACTORS, files, "0.1.0", {"inputs": [1, 2]})


@pytest.fixture
def remote(store: ArtifactStore, manifest: Manifest, files: dict[str, Path], signer: Signer) -> ArtifactStore:
    """Each kind of store, with a signed set."""
    published = publish(store, manifest, files, signer)
    assert published.result == "published", published.reason
    return store


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all held until all are known, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports
