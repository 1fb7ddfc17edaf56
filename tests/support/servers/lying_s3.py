"""Serves one S3 object, ``config.json`` under the prefix ``x`` of any bucket, and lies as it is told."""

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ETAG = '"0123456789abcdef0123456789abcdef"'
OTHER = '"ffffffffffffffffffffffffffffffff"'
_LISTING = (
    '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>{more}</IsTruncated>'
    "<NextContinuationToken>next</NextContinuationToken><Contents><Key>x/{name}</Key><Size>{size}</Size>"
    "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{etag}</ETag></Contents></ListBucketResult>"
)


class LyingS3(ThreadingHTTPServer):
    """``lie``: see ``_Handler``. ``sent``: bytes of bodies that went out."""

    daemon_threads = True

    def __init__(self, content: bytes, lie: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content, self.lie = content, lie
        self.lock = threading.Lock()
        self.gets = 0
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave in the middle, as they should."""


@contextlib.contextmanager
def lying_s3(content: bytes, lie: str) -> Iterator[LyingS3]:
    """The server, until the block ends."""
    with LyingS3(content, lie) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: LyingS3

    def do_GET(self) -> None:
        if "list-type=2" in self.path:
            self._list()
        else:
            self._get()
        self.close_connection = True

    def _list(self) -> None:
        lie = self.server.lie
        more = str(lie == "endless pages").lower()
        page = _LISTING.format(more=more, name="config.json", size=len(self.server.content), etag=ETAG).encode()
        if lie == "endless listing":
            self._head(200, {})
            self._stream(b"<!--" + b"x" * 65536, 0.0)
        elif lie == "dripping listing":
            self._head(200, {})
            self._stream(b" ", 0.2)
        else:
            self._head(200, {"Content-Length": str(len(page))})
            self.wfile.write(page)

    def _get(self) -> None:
        with self.server.lock:
            self.server.gets += 1
            first_time = self.server.gets == 1
        content, lie = self.server.content, self.server.lie
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", f"bytes=0-{len(content) - 1}"))
        assert match
        first, last = int(match[1]), int(match[2])
        body = content[first : last + 1]
        headers = {
            "ETag": ETAG,
            "Content-Range": f"bytes {first}-{last}/{len(content)}",
            "Content-Length": str(len(body)),
        }
        match lie:
            case "truncated":
                body = body[: len(body) // 2]
            case "shorter than asked":
                body, headers["Content-Length"] = body[:-1], str(len(body) - 1)
            case "longer than asked":
                body, headers["Content-Length"] = body + b"!", str(len(body) + 1)
            case "other version" if not first_time:
                headers["ETag"] = OTHER
            case "other range":
                headers["Content-Range"] = f"bytes {first + 1}-{last + 1}/{len(content)}"
            case "no length":
                del headers["Content-Length"]
            case "no etag":
                del headers["ETag"]
            case "endless error":
                self._head(500, {})
                self._stream(b"x" * 65536, 0.0)
                return
            case "drip":
                self._head(206, headers)
                self._stream(b"x", 0.2)
                return
        self._head(206, headers)
        self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, piece: bytes, seconds: float) -> None:
        """For ever."""
        with contextlib.suppress(OSError):
            while not self.server.closing.wait(seconds):
                self.wfile.write(piece)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        pass
