"""Provides real S3 servers, moto and Ceph, and one that never answers."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CEPH = Path(__file__).parent / "ceph.sh"
_HAS_CEPH = all(map(shutil.which, ("radosgw", "ceph-mon", "ceph-osd")))
REAL = "ceph" if _HAS_CEPH else "moto"  # the one server of tests that take long


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
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def black_hole() -> Iterator[str]:
    """Accepts connections, reads nothing, answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="session")
def ceph_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ceph RGW, which checks credentials; see the users in ceph.sh."""
    if not _HAS_CEPH:
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


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all held until all are known, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports
