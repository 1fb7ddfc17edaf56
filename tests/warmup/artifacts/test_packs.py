"""Packs: a set comes in one request where it can, and never less right than file by file."""

import errno
import gzip
import hashlib
import http.client
import logging
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.fakes.passing_time import ModuleClock

from snapcap.warmup.artifacts import packs
from snapcap.warmup.artifacts.fetch import Fetched, fetch
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.manifest import Blob, Manifest
from snapcap.warmup.artifacts.packs import Pack
from snapcap.warmup.artifacts.publish import publish
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.signing import Signer, Trust
from snapcap.warmup.artifacts.store import StoreDeniedError, StoreError, blob_name
from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.download import PART_BYTES

Get = Callable[[], Fetched]


@pytest.fixture
def published(s3_store: S3Store, manifest: Manifest, files: dict[str, Path], signer: Signer) -> S3Store:
    assert publish(s3_store, manifest, files, signer).result == "published"
    return s3_store


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the objects that are downloaded."""
    names: list[str] = []
    download = S3Store.download

    def watched(store: S3Store, sizes: Any, *rest: Any) -> Any:
        names.extend(sizes)
        return download(store, sizes, *rest)

    monkeypatch.setattr(S3Store, "download", watched)
    return names


@pytest.fixture
def pack(manifest: Manifest) -> Pack:
    of = Pack.of(manifest.entries.values())
    assert of is not None
    return of


@pytest.fixture
def get(published: S3Store, local: FolderStore, manifest: Manifest, trust: Trust) -> Get:
    """Fetches the set that is published."""
    return lambda: fetch(published, local, manifest.key, manifest.factors, trust, 60)


def blobs_of(contents: Iterable[bytes]) -> list[Blob]:
    return [Blob(hashlib.sha256(content).hexdigest(), len(content)) for content in contents]


def assert_whole(fetched: Fetched, contents: dict[str, bytes]) -> None:
    assert fetched.result == "hit", fetched.reason
    assert {name: entry.read() for name, entry in fetched.entries.items()} == contents


def test_a_set_comes_in_one_object(
    get: Get, pack: Pack, manifest: Manifest, asked: list[str], contents: dict[str, bytes]
) -> None:
    fetched = get()
    assert_whole(fetched, contents)
    assert asked == [pack.name]
    assert fetched.bytes_fetched == manifest.total_bytes


REFUSALS = {
    "InvalidObjectState": 403,
    "InternalError": 500,
    "SlowDown": 503,
    "KMS.DisabledException": 400,
    "InvalidRequest": 400,
    "MethodNotAllowed": 405,
    "NoSuchKey": 404,
    "PermanentRedirect": 301,
    "an unknown code": 418,
}
# Replies to GET of a pack: changes of the headers that a right one has, and of its body.
LIES: dict[str, tuple[dict[str, str], Callable[[bytes], bytes]]] = {
    "unranged": ({"Content-Range": ""}, lambda body: body + body),
    "shorter than asked": ({}, lambda body: body[:-1]),
    "longer than asked": ({}, lambda body: body + b"!"),
    "truncated": ({"Content-Length": "as it was"}, lambda body: body[: len(body) // 2]),
    "another range": ({"Content-Range": "bytes 1-2/3"}, lambda body: body),
    "other bytes": ({}, lambda body: body[::-1]),
    "compressed": ({"Content-Encoding": "gzip"}, gzip.compress),
    "nothing": ({}, lambda body: b""),
}
SLOW = {"silent": 3600.0, "drip": 0.1}


class HostileS3(ThreadingHTTPServer):
    """Passes requests on to S3, but answers GET of a pack as an attack says."""

    daemon_threads = True

    def __init__(self, behind: str, attack: str) -> None:
        super().__init__(("127.0.0.1", 0), _Hostile)
        self.behind, self.attack = urlsplit(behind), attack
        self.asked: list[str] = []
        self.closing = threading.Event()


class _Hostile(BaseHTTPRequestHandler):
    server: HostileS3

    def do_GET(self) -> None:
        attack = self.server.attack
        is_pack = "/blobs/packs/" in self.path
        connection = http.client.HTTPConnection(str(self.server.behind.hostname), self.server.behind.port)
        sent = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        connection.request("GET", self.path, headers=sent)
        reply = connection.getresponse()
        status, headers, body = reply.status, dict(reply.getheaders()), reply.read()
        connection.close()
        headers = {name: value for name, value in headers.items() if name.lower() not in ("connection", "server")}
        if is_pack:
            self.server.asked.append(attack)
        if is_pack and attack in REFUSALS:
            status, headers = REFUSALS[attack], {}
            body = f"<Error><Code>{attack}</Code><Message>no</Message></Error>".encode()
        elif is_pack and attack in LIES:
            changes, change = LIES[attack]
            length, body = len(body), change(body)
            headers = {name: value for name, value in {**headers, **changes}.items() if value}
            headers["Content-Length"] = str(length if "Content-Length" in changes else len(body))
            status = 206 if "Content-Range" in headers else 200
        elif is_pack and attack == "silent":
            self.server.closing.wait(SLOW[attack])
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in (body[i : i + 1] for i in range(len(body))) if is_pack and attack == "drip" else (body,):
            self.wfile.write(piece)
            if attack == "drip" and is_pack and self.server.closing.wait(SLOW[attack]):
                return
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        pass


@pytest.mark.parametrize("s3_store", ["moto"], indirect=True)
@pytest.mark.parametrize("attack", [*REFUSALS, *LIES, *SLOW])
def test_no_reply_of_a_pack_alone_costs_a_set(
    attack: str,
    published: S3Store,
    s3_server: str,
    local: FolderStore,
    manifest: Manifest,
    trust: Trust,
    contents: dict[str, bytes],
) -> None:
    """Whatever an S3 server says of it, or if it says nothing."""
    deadline = 16.0 if attack in SLOW else 60.0
    with HostileS3(s3_server, attack) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients leave in the middle
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        options = S3Options(endpoint_url=url, region="us-east-1", deadline=deadline)
        try:
            store = S3Store.open(published.location, options)
            fetched = fetch(store, local, manifest.key, manifest.factors, trust, deadline)
        finally:
            server.closing.set()
            server.shutdown()
    assert_whole(fetched, contents)
    assert set(server.asked) == {attack}
    if attack in SLOW:
        assert fetched.seconds >= deadline / 4 * 0.9


@pytest.mark.parametrize("kind", ["silent", "unranged", "odd"])
def test_a_pack_that_never_comes_takes_a_quarter_of_the_time(
    kind: str,
    get: Get,
    pack: Pack,
    published: S3Store,
    contents: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    download, deadlines = S3Store.download, []

    def slow(store: S3Store, sizes: Any, folder: Path, deadline: float) -> Any:
        if pack.name not in sizes:
            deadlines.append(deadline)
            return download(store, sizes, folder, deadline)
        deadlines.append(deadline)
        match kind:
            case "silent":
                raise StoreError("the download did not finish before its deadline")
            case "unranged":
                raise StoreError("the server does not answer ranged reads; use one that does")
            case _:
                raise TypeError("what no store should do")

    monkeypatch.setattr(S3Store, "download", slow)
    clock = ModuleClock()
    monkeypatch.setattr(packs, "time", clock)
    assert_whole(get(), contents)
    of_pack, of_files = (deadline - clock.monotonic() for deadline in deadlines)
    assert of_pack == pytest.approx(of_files / 4)


@pytest.mark.parametrize("damage", ["missing", "denied", "shorter", "longer", "one file", "all"])
def test_without_a_right_pack_files_come_one_by_one(
    damage: str,
    published: S3Store,
    get: Get,
    pack: Pack,
    manifest: Manifest,
    asked: list[str],
    contents: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = published.read(pack.name, 1 << 20)
    assert stored is not None
    damaged = manifest.entries["blocks.pt2"]
    start = sum(blob.size for blob in pack.blobs[: pack.blobs.index(damaged)])
    match damage:
        case "missing":
            published.delete(pack.name)
        case "denied":
            download = S3Store.download

            def denied(store: S3Store, sizes: Any, *rest: Any) -> Any:
                if pack.name in sizes:
                    asked.extend(sizes)
                    raise StoreDeniedError("access is denied")
                return download(store, sizes, *rest)

            monkeypatch.setattr(S3Store, "download", denied)
        case "shorter":
            published.write(pack.name, stored.data[:-1])
        case "longer":
            published.write(pack.name, stored.data + b"!")
        case "one file":
            published.write(pack.name, stored.data[:start] + b"!" + stored.data[start + 1 :])
        case _:
            published.write(pack.name, b"!" * len(stored.data))
    with caplog.at_level(logging.INFO, "snapcap.store"):
        fetched = get()
    assert_whole(fetched, contents)
    assert fetched.bytes_fetched == manifest.total_bytes
    one_by_one = {blob_name(blob) for blob in pack.blobs if blob.size}
    if damage == "one file":
        one_by_one = {blob_name(damaged)}
    assert set(asked) - {blob_name(Blob(hashlib.sha256().hexdigest(), 0))} == {pack.name} | one_by_one
    assert ("one by one" in caplog.text) is (damage in ("missing", "denied", "shorter", "longer"))


def test_a_file_that_is_wrong_in_both_is_no_hit(
    published: S3Store, local: FolderStore, get: Get, pack: Pack, manifest: Manifest
) -> None:
    blob = manifest.entries["blocks.pt2"]
    published.write(pack.name, b"!" * pack.size)
    published.write(blob_name(blob), b"!" * blob.size)
    fetched = get()
    assert fetched.result == "corrupt"
    assert blob.digest in fetched.reason
    assert not local.path(blob_name(blob)).exists()


def test_what_is_here_already_is_not_brought_again(
    local: FolderStore, get: Get, manifest: Manifest, asked: list[str]
) -> None:
    get()
    blob = manifest.entries["blocks.pt2"]
    local.delete(blob_name(blob))
    asked.clear()
    assert get().bytes_fetched == blob.size
    assert asked == [blob_name(blob)]


def test_a_replaced_set_has_a_right_pack_again(
    published: S3Store, pack: Pack, manifest: Manifest, files: dict[str, Path], signer: Signer
) -> None:
    before = published.read(pack.name, 1 << 20)
    published.write(pack.name, b"!" * pack.size)
    assert publish(published, manifest, files, signer, replace=True).result == "published"
    after = published.read(pack.name, 1 << 20)
    assert before is not None
    assert after is not None
    assert before.data == after.data


def test_a_folder_has_no_pack(local: FolderStore, manifest: Manifest, files: dict[str, Path]) -> None:
    assert publish(local, manifest, files, None).result == "published"
    assert not local.path("blobs/packs").exists()


def test_a_disk_without_room_for_pack_and_files_may_have_room_for_the_files(
    get: Get, pack: Pack, local: FolderStore, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def sizes_of_files() -> list[int]:
        return [path.stat().st_size for path in local.root.rglob("*") if path.is_file()]

    before: list[list[int]] = []
    download = S3Store.download

    def watched(store: S3Store, sizes: Any, *rest: Any) -> Any:
        before.append(sizes_of_files())
        return download(store, sizes, *rest)

    monkeypatch.setattr(S3Store, "download", watched)
    monkeypatch.setattr(Pack, "cut", refuse)
    assert_whole(get(), contents)
    assert len(before) == 2
    assert pack.size not in before[1], "the pack makes room"


def test_only_what_spares_requests_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, empty = blobs_of([b"one", b"other", b""])
    large = Blob("f" * 64, PART_BYTES + 1)
    assert Pack.of([]) is None
    assert Pack.of([one, one, large]) is None
    pack = Pack.of([one, other, large, empty, other])
    assert pack is not None
    assert set(pack.blobs) == {one, other, empty}
    assert pack.size == 8
    same = Pack.of([empty, other, one])
    assert same is not None
    assert same.name == pack.name
    more = Pack.of([one, other])
    assert more is not None
    assert more.name != pack.name
    monkeypatch.setattr(packs, "_MOST_BYTES", 7)
    assert Pack.of([one, other]) is None


def test_a_temporary_folder_without_room_for_a_pack_is_named(
    s3_store: S3Store, manifest: Manifest, files: dict[str, Path], signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(pack: Pack, files: dict[Blob, Path], target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write raises it

    monkeypatch.setattr(Pack, "write", full)
    published = publish(s3_store, manifest, files, signer)
    assert (published.result, "None" in published.reason) == ("error", False)
    assert "snapcap-pack-" in published.reason
    monkeypatch.setattr(packs, "scratch_folder", lambda prefix: full(Pack(()), {}, Path(prefix)))
    assert publish(s3_store, manifest, files, signer).reason.startswith("No space left on device")
