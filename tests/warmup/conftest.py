"""A real S3 server for the tests of this folder."""

import os
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer

from warmup.s3 import S3Options, client


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
