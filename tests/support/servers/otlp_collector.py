"""Takes the spans that are exported by OTLP over HTTP, as a collector does."""

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_PATIENCE_S = 30.0


class Collector:
    """``spans``: as protobuf has them; ``resource``: attributes of the last that exported; ``headers``: of its
    request."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.address = ""

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        self.headers = headers
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {each.key: each.value.string_value for each in group.resource.attributes}
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def wait_for(self, count: int) -> list[Any]:
        """The spans, once there are so many, in the order of their begin."""
        end = time.monotonic() + _PATIENCE_S
        while len(self.spans) < count:
            assert time.monotonic() < end, [span.name for span in self.spans]
            time.sleep(0.02)
        return sorted(self.spans, key=lambda span: span.start_time_unix_nano)


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector at ``address``."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(body, {name.lower(): value for name, value in self.headers.items()})
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()
