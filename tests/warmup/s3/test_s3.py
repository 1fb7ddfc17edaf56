"""Downloads from real HTTP servers: moto's S3, one that breaks off, one that never answers."""

import os
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError, EndpointConnectionError
from support.servers.server_process import reserved_port

from snapcap.warmup.options import S3Options
from snapcap.warmup.s3.client import ObjectChangedError, S3Error, client, split_uri, translated
from snapcap.warmup.s3.download import PART_BYTES, S3Object, download, list_objects

POINT = "arn:aws:s3:us-east-1:123456789012:accesspoint/point"
REGIONS = "arn:aws:s3::123456789012:accesspoint/abcdef.mrap"
OUTPOST = "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-01/accesspoint/point"
CHECK = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile"
LARGE = 2 * PART_BYTES + 12_345


pytestmark = pytest.mark.usefixtures("aws_environment")


class Body:
    """What botocore reads a reply from."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self) -> Iterator[bytes]:
        yield self._content


def soon(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def listed(s3: Any, key: str) -> S3Object:
    return next(o for o in list_objects(s3, "bucket", key.rpartition("/")[0], soon()) if o.key == key)


def download_one(s3: Any, source: S3Object, dest: Path, deadline: float) -> None:
    list(download(s3, "bucket", {dest: source}, deadline))


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://bucket/a/b/", ("bucket", "a/b")),
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/a?b#c", ("bucket", "a?b#c")),
        (f"s3://{POINT}/a/b", (POINT, "a/b")),
        (f"s3://{POINT.replace('/', ':')}", (POINT.replace("/", ":"), "")),
        (f"s3://{REGIONS}/a/b", (REGIONS, "a/b")),
        (f"s3://{OUTPOST}/a/b", (OUTPOST, "a/b")),
    ],
)
def test_an_address_is_a_bucket_and_a_prefix(uri: str, expected: tuple[str, str]) -> None:
    assert split_uri(uri) == expected


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3:///prefix",
        "https://bucket/prefix",
        "s3://[bucket]/x",
        "s3://[::1/x",
        "s3://buck et/x",
        "s3://b?x/y",
        "s3://bucket:80/x",
        "s3://bucket/\n",
        "s3://bucket/\0x",
        "s3://bucket/\udcff",
        "s3://arn:aws:s3:::bucket/x",
        "s3://arn:aws:iam::123456789012:role/x",
        "s3://" + "b" * 100_000,
        "s3://key:secret@bucket/x",
    ],
)
def test_what_is_no_address_is_refused(uri: str) -> None:
    with pytest.raises(S3Error, match="write s3://bucket/prefix") as raised:
        split_uri(uri)
    text = str(raised.value)
    assert text.isprintable()
    assert len(text) < 400
    assert "secret" not in text


def test_an_access_point_is_asked_at_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As botocore does it, which a dictionary of headers and a URL shows."""
    bucket, prefix = split_uri(f"s3://{POINT}/a")
    seen: list[str] = []

    def send(request: Any, **_: Any) -> None:
        seen.append(request.url)
        raise EndpointConnectionError(endpoint_url=request.url)

    s3 = client(S3Options(region="eu-west-1"))
    s3.meta.events.register_first("before-send.s3", send)
    with pytest.raises(S3Error, match="cannot connect"):
        list_objects(s3, bucket, prefix, soon())
    assert {url.partition("?")[0] for url in seen} == {
        "https://point-123456789012.s3-accesspoint.us-east-1.amazonaws.com/"
    }


def test_a_listing_holds_only_what_is_directly_under_the_prefix(s3: Any) -> None:
    for key in ("a/x", "a/deep/y", "ab/z", "a/", "top"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"12345")
    assert [(o.key, o.size) for o in list_objects(s3, "bucket", "a", soon())] == [("a/x", 5)]
    assert [o.key for o in list_objects(s3, "bucket", "", soon())] == ["top"]
    assert list_objects(s3, "bucket", "none", soon()) == []


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, LARGE])
def test_an_object_arrives_whole(s3: Any, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    s3.put_object(Bucket="bucket", Key="x", Body=content)
    source = listed(s3, "x")
    dest = tmp_path / "deep" / "x.bin"
    download_one(s3, source, dest, soon())
    assert dest.read_bytes() == content
    assert list(dest.parent.iterdir()) == [dest]


@pytest.mark.parametrize("size", [100, 100 + LARGE])
def test_an_object_that_was_replaced_is_refused(s3: Any, tmp_path: Path, size: int) -> None:
    s3.put_object(Bucket="bucket", Key="x", Body=b"old" + os.urandom(97))
    source = listed(s3, "x")
    s3.put_object(Bucket="bucket", Key="x", Body=os.urandom(size))
    with pytest.raises(ObjectChangedError, match="s3://bucket/x: the object was replaced"):
        download_one(s3, source, tmp_path / "x", soon())
    assert list(tmp_path.iterdir()) == []


def test_what_was_complete_stays_when_a_later_object_fails(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="bucket", Key="good", Body=b"good")
    missing = S3Object("gone", 4, '"0"')
    items = {tmp_path / "good": listed(s3, "good"), tmp_path / "gone": missing}
    arriving = download(s3, "bucket", items, soon())
    assert next(arriving) == tmp_path / "good"
    with pytest.raises(S3Error, match="s3://bucket/gone: the object does not exist any more"):
        next(arriving)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_a_file_that_cannot_be_written_is_named(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        S3Error, match=r"s3://bucket/x: cannot be written to .*/file/x: (Not a directory|File exists)"
    ):
        download_one(s3, S3Object("x", 1, '"0"'), tmp_path / "file" / "x", soon())


def test_a_missing_bucket_is_named(s3: Any) -> None:
    with pytest.raises(S3Error, match="s3://nothing/a: the bucket does not exist"):
        list_objects(s3, "nothing", "a", soon())


def test_an_impossible_bucket_is_named(s3: Any) -> None:
    with pytest.raises(S3Error, match="that is not a bucket name"):
        list_objects(s3, "no bucket!", "a", soon())


def test_wrong_credentials_are_named(s3_server: str, s3: Any) -> None:
    def check_credentials(after: bytes) -> None:
        headers = {"Content-Type": "text/plain"}
        urlopen(Request(f"{s3_server}/moto-api/reset-auth", after, headers, method="POST")).close()

    check_credentials(b"0")
    try:
        with pytest.raises(S3Error, match=r"s3://bucket/a: the access key .* AWS_ACCESS_KEY_ID"):
            list_objects(s3, "bucket", "a", soon())
    finally:
        check_credentials(b"inf")


def test_without_credentials_a_public_bucket_is_read_and_a_private_one_is_named(
    s3: Any, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3.put_object(Bucket="bucket", Key="a/x", Body=b"x")
    signed: list[bool] = []
    refusal: list[Any] = []

    def before_send(request: Any, **_: Any) -> Any:
        signed.append("Authorization" in request.headers)
        return refusal[0] if refusal else None

    public = client(S3Options(endpoint_url=s3_server))
    public.meta.events.register_first("before-send.s3", before_send)
    assert [entry.key for entry in list_objects(public, "bucket", "a", soon())] == ["a/x"]
    assert signed == [False]
    body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    refusal.append(AWSResponse(s3_server, 403, {}, Body(body)))
    with pytest.raises(S3Error, match=r"without credentials.* check AWS_ACCESS_KEY_ID .*\(NoCredentials\)$"):
        list_objects(public, "bucket", "a", soon())


@pytest.mark.parametrize("way", ["web identity", "profile"])
def test_a_role_is_assumed_of_which_another_service_gives_the_credentials(
    way: str, s3: Any, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS's Kubernetes names a token's file; a profile names a role and whose credentials assume it."""
    role = "arn:aws:iam::123456789012:role/captions"
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3_server)
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    (tmp_path / "file").write_text(
        f"[profile other]\nrole_arn = {role}\nsource_profile = own\n"
        "[profile own]\naws_access_key_id = key\naws_secret_access_key = secret\n"
    )
    if way == "profile":
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "file"))
        monkeypatch.setenv("AWS_ROLE_ARN", role)
    s3.put_object(Bucket="bucket", Key="a/x", Body=b"x")
    tokens: list[bool] = []
    own = client(S3Options(endpoint_url=s3_server, profile="other" if way == "profile" else None))
    own.meta.events.register_first(
        "before-send.s3", lambda request, **_: tokens.append("X-Amz-Security-Token" in request.headers)
    )
    assert [entry.key for entry in list_objects(own, "bucket", "a", soon())] == ["a/x"]
    assert tokens == [True]
    assert own.meta.region_name == "eu-west-3"


@pytest.mark.parametrize(
    ("code", "message", "operation", "said"),
    [
        ("Odd", "Do  that\nfirst.", "ListObjectsV2", "S3 refused the request (Odd: Do that first.)"),
        ("Odd", "", "ListObjectsV2", "S3 refused the request (Odd)"),
        (
            "AccessDenied",
            "Not authorized",
            "AssumeRoleWithWebIdentity",
            "the role cannot be assumed; check its trust policy and the token (AccessDenied: Not authorized)",
        ),
        ("Odd", "x\x1b[31m" + "y" * 10_000, "GetObject", "S3 refused the request (Odd: x [31m" + "y" * 294 + ")"),
        (
            "SlowDown",
            "Please reduce your request rate.",
            "GetObject",
            "S3 asks for fewer requests; try again later (SlowDown)",
        ),
        (
            "AccessDenied",
            "Access Denied",
            "ListObjectsV2",
            f"give the role s3:ListBucket, or {CHECK} (AccessDenied)",
        ),
        ("403", "Forbidden", "HeadObject", f"give the role s3:ListBucket and s3:GetObject, or {CHECK} (403)"),
        (
            "AccessDenied",
            "no kms:GenerateDataKey",
            "PutObject",
            f"s3:PutObject, or {CHECK} (AccessDenied: no kms:GenerateDataKey)",
        ),
        ("AccessDenied", "", "UploadPart", f"give the role s3:PutObject, or {CHECK} (AccessDenied)"),
        ("AccessDenied", "", "DeleteObject", f"give the role s3:DeleteObject, or {CHECK} (AccessDenied)"),
    ],
)
def test_a_refusal_says_what_s3_says_and_which_permission_it_takes(
    code: str, message: str, operation: str, said: str
) -> None:
    with pytest.raises(S3Error) as raised, translated("s3://bucket/x"):
        raise ClientError({"Error": {"Code": code, "Message": message}}, operation)
    assert str(raised.value).endswith(said)
    assert str(raised.value).isprintable()


def test_an_object_that_no_disk_has_room_for_is_not_fetched(s3_server: str, tmp_path: Path) -> None:
    """As a server could announce it, whose number of parts alone would fill the memory."""
    items = {tmp_path / "a": S3Object("a", 1 << 60, "")}
    with pytest.raises(S3Error, match="No space left on device; free some there"):
        list(download(client(S3Options(endpoint_url=s3_server)), "bucket", items, soon()))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(S3Error, match="the profile is not in the AWS configuration"):
        client(S3Options(profile="nobody"))


def test_an_endpoint_that_is_no_url_is_named() -> None:
    with pytest.raises(S3Error, match="localhost"):
        client(S3Options(endpoint_url="localhost:9000"))


def test_nobody_at_the_endpoint(tmp_path: Path) -> None:
    with reserved_port() as nobody:
        options = S3Options(endpoint_url=f"http://user:secret@127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(S3Error, match="cannot connect; check the endpoint and the network") as caught:
            list_objects(client(options), "bucket", "a", soon())
    assert "//…@127.0.0.1" in str(caught.value), "everybody may read it in /startup"
    assert "secret" not in str(caught.value)


def test_an_endpoint_that_never_answers_ends_a_listing(black_hole: str) -> None:
    # The read timeout alone would outlast the test: the deadline of the options shortens it.
    options = S3Options(endpoint_url=black_hole, read_timeout=3600, deadline=0.6)
    with pytest.raises(S3Error, match="no answer within the read timeout"):
        list_objects(client(options), "bucket", "a", soon())


def test_the_deadline_ends_a_read_that_never_returns(black_hole: str, tmp_path: Path) -> None:
    s3 = client(S3Options(endpoint_url=black_hole, read_timeout=5))
    with pytest.raises(S3Error, match="s3://bucket/x: the download did not finish before its deadline"):
        download_one(s3, S3Object("x", 10, '"0"'), tmp_path / "x", soon(0.2))
    assert list(tmp_path.iterdir()) == []


class BreakingServer(ThreadingHTTPServer):
    """Serves one object in ranges and hangs up in the middle of the first ``breaks`` replies."""

    daemon_threads = True

    def __init__(self, content: bytes, breaks: int) -> None:
        super().__init__(("127.0.0.1", 0), BreakingHandler)
        self.content, self.breaks = content, breaks
        self.lock = threading.Lock()
        self.asked: list[tuple[int, int]] = []


class BreakingHandler(BaseHTTPRequestHandler):
    server: BreakingServer

    def do_GET(self) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert match
        first, last = int(match[1]), int(match[2])
        body = self.server.content[first : last + 1]
        with self.server.lock:
            self.server.asked.append((first, last))
            broken = len(self.server.asked) <= self.server.breaks
        self.send_response(206)
        self.send_header("ETag", '"etag"')
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.server.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if broken else body)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        pass


@pytest.mark.parametrize(("breaks", "arrives"), [(1, True), (2, True), (3, False)])
def test_a_read_that_breaks_off_goes_on_where_it_stopped(tmp_path: Path, breaks: int, arrives: bool) -> None:
    content = os.urandom(3_000_000)
    with BreakingServer(content, breaks) as breaking:
        threading.Thread(target=breaking.serve_forever, daemon=True).start()
        s3 = client(S3Options(endpoint_url=f"http://127.0.0.1:{breaking.server_address[1]}"))
        dest = tmp_path / "x"
        if arrives:
            download_one(s3, S3Object("x", len(content), '"etag"'), dest, soon())
            assert dest.read_bytes() == content
            starts = [first for first, _ in breaking.asked]
            assert starts == sorted(set(starts)), "a part began again from its start"
        else:
            with pytest.raises(S3Error, match="s3://bucket/x"):
                download_one(s3, S3Object("x", len(content), '"etag"'), dest, soon())
            assert list(tmp_path.iterdir()) == []
        breaking.shutdown()
