"""Provides a real Redis."""

import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[str]:
    """The address of an empty Redis that keeps nothing on disk."""
    redis = pytest.importorskip("redis", reason="THE PACKAGE redis IS NOT INSTALLED: pip install 'snapcap[redis]'")
    if shutil.which("redis-server") is None:
        pytest.skip("REDIS IS NOT INSTALLED: apt-get install redis-server TO TEST TORCH'S REMOTE CACHES")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = f"--bind 127.0.0.1 --port {port} --save '' --appendonly no --dir {shlex.quote(str(tmp_path))}"
    with (tmp_path / "redis.log").open("w") as log:
        server = subprocess.Popen(["redis-server", *shlex.split(options)], stdout=log, stderr=log)
    try:
        address = f"redis://127.0.0.1:{port}"
        with redis.Redis.from_url(address, retry=_patient(redis)) as client:
            assert client.ping()
        yield address
    finally:
        server.kill()
        server.wait()


def _patient(redis: object) -> object:
    """Asks again for some seconds while the server starts."""
    from redis.backoff import ConstantBackoff
    from redis.retry import Retry

    return Retry(ConstantBackoff(0.1), 100)
