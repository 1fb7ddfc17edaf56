"""Makes real starts on a device: a build of the demo model, and a jit start, in the background; and servers."""

import importlib.util
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.servers.server_process import ServerProcess, snapcap

PREPARED = {"SNAPCAP_PREPARED_WEIGHTS": "true"}
BUCKETS = ("--buckets", "1,4")
JIT = ("--backend", "jit", "--buckets", "1", "--strict")
PUBLISHED = 'snapcap_artifact_publish_total{result="published"}'
Served = tuple[dict[str, Any], dict[str, float], dict[Path, str]]


class Background:
    """Both that take long, at once: the build, and a jit start on an empty store."""

    def __init__(self, folder: Path, device: str, samples: dict[Path, str]) -> None:
        self.built, self.jit = folder / "built", folder / "jit"
        pool = ThreadPoolExecutor(2)
        options = ("--cache-dir", str(self.built), "--device", device, *BUCKETS)
        self.build = pool.submit(snapcap, "build", *options, timeout=500, **PREPARED)
        start = self.jit, device, JIT, samples
        self.cold = pool.submit(serve, *start, publishes=True) if servable() else Future[Served]()
        pool.shutdown(wait=False)


def servable() -> bool:
    return all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "prometheus_client"))


def serve(
    cache: Path, device: str, options: tuple[str, ...], samples: dict[Path, str], publishes: bool = False
) -> Served:
    """/startup, metrics and captions of a server that is ready, and if it publishes has done so."""
    with ServerProcess("--cache-dir", str(cache), "--device", device, *options, **PREPARED) as server:
        server.wait_for(lambda: server.call("/readyz")[0] == 200, seconds=400)
        startup = server.startup()
        captions = {path: server.caption(path)["caption"] for path in samples}
        if publishes:
            server.wait_for(lambda: server.metrics().get(PUBLISHED, 0) > 0)
        return startup, server.metrics(), captions
