"""Loads a server lightly after a start without artifacts, until everything is compiled, and times its clients."""

import threading
import time
from typing import Any

from snapcap.benchmarks.harness.measurements import percentiles_ms
from snapcap.benchmarks.harness.server import Server
from snapcap.benchmarks.harness.workload import Workload

PAUSE_S = 0.05
BEGIN_LIMIT_S = 20.0
POLL_S = 0.25
# The last bucket is swapped in just before its set is published.
PUBLISH_LIMIT_S = 30.0
BUILD_LIMIT_S = 1800.0


class LightLoad:
    """A client that requests a caption, waits a little, and requests again. A context manager."""

    def __init__(self, server: Server, workload: Workload) -> None:
        self._server = server
        self._workload = workload
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.latencies: list[float] = []
        self.failures: list[str] = []

    def __enter__(self) -> "LightLoad":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        image, _ = self._workload.first_image
        while not self._over.wait(PAUSE_S):
            began = time.monotonic()
            try:
                connection = self._server.connect()
                reply = self._server.caption(connection, image)
                connection.close()
                self._workload.check(reply.json())
            except (OSError, RuntimeError, ValueError) as error:
                self.failures.append(str(error).splitlines()[0])
            self.latencies.append(time.monotonic() - began)


def until_building(server: Server) -> dict[str, Any]:
    """Waits for the background build to begin, because a start without one is another case.

    Raises:
        RuntimeError: the build has not begun. The message has its state.
    """
    end = time.monotonic() + BEGIN_LIMIT_S
    while True:
        build: dict[str, Any] = server.get("/startup").json()["build"] or {}
        if build.get("state") in ("building", "published"):
            return build
        if build.get("state") in ("failed", "declined") or time.monotonic() > end:
            raise RuntimeError(f"no build in the background: {build}")
        time.sleep(POLL_S)


def until_compiled(server: Server, workload: Workload, limit: float) -> dict[str, Any]:
    """Loads the server lightly until all its buckets are compiled and published.

    Returns ``all_compiled`` in seconds since the spawn (None after ``limit`` seconds), the state of the build, and
    the load's ``requests``, ``failed``, percentiles and ``max_ms``.
    """
    compiled: float | None = None
    with LightLoad(server, workload) as load:
        while True:
            startup = server.get("/startup").json()
            build = startup["build"] or {}
            if compiled is None and {bucket["backend"] for bucket in startup["buckets"]} == {"aot"}:
                compiled = server.seconds()
            published = build.get("state") == "published"
            late = compiled is not None and server.seconds() > compiled + PUBLISH_LIMIT_S
            if (compiled is not None and published) or late or build.get("state") == "failed":
                break
            if server.seconds() > limit:
                break
            time.sleep(POLL_S)
    return {
        "all_compiled": compiled,
        "build": {name: build[name] for name in ("state", "done", "of", "error") if name in build},
        "requests": len(load.latencies),
        "failed": len(load.failures),
        "failures": load.failures[:5],
        **(percentiles_ms(load.latencies) if load.latencies else {}),
        "max_ms": max(load.latencies, default=0.0) * 1000,
        "swaps": {name: value for name, value in server.metrics().items() if "bucket_swaps" in name},
    }
