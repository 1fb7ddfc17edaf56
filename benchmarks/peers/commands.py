"""Lists the peers: how each is started and asked, and which packages it needs."""

import importlib.util
import sys
from dataclasses import dataclass, replace

from snapcap.benchmarks.harness.server import Endpoint
from snapcap.benchmarks.harness.workload import Workload


@dataclass(frozen=True)
class Peer:
    """A server that is not ours."""

    title: str
    module: str
    needs: tuple[str, ...]
    api: Endpoint
    options: tuple[str, ...] = ()

    def command(self, workload: Workload, device: str) -> tuple[str, ...]:
        model = ("--model", str(workload.folder), "--device", device)
        return (sys.executable, "-m", self.module, *model, *self.options)

    @property
    def missing(self) -> list[str]:
        """The packages it needs that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


_PLAIN = Peer(
    "FastAPI + transformers generate",
    "snapcap.benchmarks.peers.transformers_server",
    ("transformers", "fastapi", "uvicorn"),
    Endpoint("/caption", None),
)
PEERS = {
    "transformers-eager": _PLAIN,
    "transformers-1-thread": replace(_PLAIN, title="the same, set_num_threads(1)", options=("--threads", "1")),
    "transformers-compile": replace(_PLAIN, title="FastAPI + transformers, torch.compile", options=("--compile",)),
    "litserve": Peer(
        "LitServe + transformers generate",
        "snapcap.benchmarks.peers.litserve_server",
        ("transformers", "litserve"),
        Endpoint("/caption", "/health", json=True),
    ),
}
