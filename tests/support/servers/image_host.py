"""Runs a web host on this machine that answers by the path, well or badly."""

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX = 100_000  # bytes of an image that the tests allow


class Host(BaseHTTPRequestHandler):
    """Answers by the path; keeps what it was asked."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        self.server.answers[self.path.partition("?")[0]](self)

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def drip(host: Host) -> None:
    host.send_response(200)
    host.send_header("Content-Length", "100000")
    host.end_headers()
    while not host.server.stopped.wait(0.02):
        host.wfile.write(b"x")
        host.wfile.flush()


def endless(host: Host) -> None:
    host.send_response(200)
    host.send_header("Transfer-Encoding", "chunked")
    host.end_headers()
    for _ in range(1000):
        host.wfile.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")


def tiny(host: Host) -> None:
    host.send_response(200)
    host.send_header("Transfer-Encoding", "chunked")
    host.end_headers()
    with contextlib.suppress(OSError):  # the client leaves
        for _ in range(100):
            host.wfile.write(b"1\r\nx\r\n" * 900)


def interim(host: Host) -> None:
    with contextlib.suppress(OSError):
        for _ in range(100):
            host.wfile.write(b"HTTP/1.1 103 \r\n\r\n" * 900)


def cut(host: Host) -> None:
    host.send_response(200)
    host.send_header("Content-Length", "10")
    host.end_headers()
    host.wfile.write(b"half")
    host.close_connection = True


def no_http(host: Host) -> None:
    host.wfile.write(b"SSH-2.0-OpenSSH_9\r\n\r\n")
    host.close_connection = True


ANSWERS: dict[str, Callable[[Host], None]] = {
    "/image": lambda host: host.reply(200, b"the image"),
    "/missing": lambda host: host.reply(404, b"no"),
    "/large": lambda host: host.reply(200, b"x" * (MAX + 1)),
    "/zipped": lambda host: host.reply(200, b"x", Content_Encoding="gzip"),
    "/k%C3%B6ln/a%20b/image": lambda host: host.reply(200, b"the image"),
    # Headers are latin-1 to `http.server`: these are the bytes of UTF-8.
    "/letters": lambda host: host.reply(302, Location="/köln/a b/image?from=ö x".encode().decode("latin-1")),
    "/astray": lambda host: host.reply(302, Location="/missing?token=secret"),
    "/password": lambda host: host.reply(302, Location="http://user:pass@images.example/image"),
    "/moved": lambda host: host.reply(302, Location="/image?from=moved"),
    "/round": lambda host: host.reply(301, Location="/round"),
    "/inside": lambda host: host.reply(302, Location="http://inside.example/image"),
    "/metadata": lambda host: host.reply(302, Location="http://169.254.169.254/latest/meta-data"),
    "/file": lambda host: host.reply(307, Location="file:///etc/passwd"),
    "/broken": lambda host: host.reply(307, Location="http://[/"),
    "/nowhere": lambda host: host.reply(302),
    "/drip": drip,
    "/endless": endless,
    "/tiny": tiny,
    "/interim": interim,
    "/cut": cut,
    "/no-http": no_http,
}


def serve(context: ssl.SSLContext | None = None) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.daemon_threads = True
    server.answers, server.asked, server.stopped = ANSWERS, [], threading.Event()
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.stopped.set()
    server.shutdown()
    thread.join()
    server.server_close()
