"""Uploads to S3 servers that ask for checksums, that refuse them, and that take them for a part of the object."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.store import StoreDeniedError, StoreError
from snapcap.warmup.options import S3Options

NAME = "blobs/sha256/" + "a" * 64
# What other makers' stores answer to checksums that they do not know.
REFUSALS = [
    (501, "NotImplemented"),
    (400, "InvalidArgument"),
    (411, "MissingContentLength"),
    (403, "SignatureDoesNotMatch"),
]


class Server(ThreadingHTTPServer):
    """``refusal``: of checksums, as status and code; ``locked``: under Object Lock; ``longer``: bytes of a checksum
    that are kept in the object; ``denied``: all writes. ``puts``: whether each upload had a checksum."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refusal: tuple[int, str] | None = None
        self.locked = False
        self.longer = 0
        self.denied = False
        self.puts: list[bool] = []
        self.objects: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        checked = any(name.lower().startswith("x-amz-checksum-") for name in self.headers)
        server.puts.append(checked)
        if server.denied:
            return self.refuse(403, "AccessDenied")
        if server.refusal and checked:
            return self.refuse(*server.refusal)
        if server.locked and not checked and "Content-MD5" not in self.headers:
            return self.refuse(400, "InvalidRequest")
        server.objects[self.path] = body + b"!" * (server.longer if checked else 0)
        return self.reply(200, b"", {"ETag": '"1234"'})

    def do_HEAD(self) -> None:
        self.reply(200, self.server.objects[self.path], {"ETag": '"1234"'})

    def refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>The store says why.</Message></Error>"
        self.reply(status, text.encode(), {})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as opened:
        threading.Thread(target=opened.serve_forever, daemon=True).start()
        yield opened
        opened.shutdown()


@pytest.fixture
def store(server: Server, aws_environment: None) -> S3Store:
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    return S3Store.open("s3://bucket/p", S3Options(endpoint_url=endpoint, region="us-east-1"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"content")
    return tmp_path / "file"


def test_a_bucket_under_object_lock_gets_the_checksums_that_it_asks_for(
    server: Server, store: S3Store, file: Path
) -> None:
    server.locked = True
    store.upload(NAME, file)
    store.write("manifests/x.json", b"x")
    assert server.puts == [True, True]
    assert set(server.objects.values()) == {b"content", b"x"}


@pytest.mark.parametrize("refusal", REFUSALS, ids=[code for _, code in REFUSALS])
def test_a_store_that_refuses_checksums_is_asked_once_and_gets_none_from_then_on(
    server: Server, store: S3Store, file: Path, refusal: tuple[int, str]
) -> None:
    server.refusal = refusal
    store.write("manifests/x.json", b"x")
    assert server.puts == [True, False]
    store.upload(NAME, file)
    store.write("manifests/y.json", b"y", if_absent=True)
    assert server.puts == [True, False, False, False]
    assert set(server.objects.values()) == {b"content", b"x", b"y"}


def test_a_store_that_keeps_the_checksum_in_the_object_is_found_out(
    server: Server, store: S3Store, file: Path
) -> None:
    server.longer = 30
    store.upload(NAME, file)
    store.upload(NAME.replace("a", "b"), file)
    assert server.puts == [True, False, False]
    assert set(server.objects.values()) == {b"content"}


def test_what_is_refused_either_way_is_told_as_it_was_refused_first(
    server: Server, store: S3Store, file: Path
) -> None:
    server.refusal, server.locked = (400, "InvalidRequest"), True
    for write in (lambda: store.upload(NAME, file), lambda: store.write("manifests/x.json", b"x")):
        with pytest.raises(StoreError, match=r"S3 refused the request \(InvalidRequest: The store says why\.\)$"):
            write()
    assert server.puts == [True, False] * 2, "nothing was learned"


def test_a_write_that_is_denied_names_the_permission_to_write(server: Server, store: S3Store, file: Path) -> None:
    server.denied = True
    for write in (lambda: store.upload(NAME, file), lambda: store.write("manifests/x.json", b"x")):
        with pytest.raises(StoreDeniedError, match=r"give the role s3:PutObject, or") as raised:
            write()
        assert "s3:GetObject" not in str(raised.value)
    assert server.puts == [True, True], "which is not asked twice"
