"""Lists the peers: how each is started and asked, and which packages it needs."""

import importlib.util
import sys
from dataclasses import dataclass

from snapcap.benchmarks.harness.server import Endpoint
from snapcap.benchmarks.harness.workload import Workload

_TRANSFORMERS = "snapcap.benchmarks.peers.transformers_server"
_LITSERVE = "snapcap.benchmarks.peers.litserve_server"


@dataclass(frozen=True)
class Peer:
    """A server that is not ours. ``compiles``: its first captions take as long as its compiler."""

    title: str
    module: str
    needs: tuple[str, ...]
    api: Endpoint
    options: tuple[str, ...] = ()
    compiles: bool = False

    def command(self, workload: Workload, device: str, *further: str) -> tuple[str, ...]:
        model = ("--model", str(workload.folder), "--device", device)
        return (sys.executable, "-m", self.module, *model, *self.options, *further)

    @property
    def missing(self) -> list[str]:
        """The packages it needs that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


PEERS = {
    "transformers-eager": Peer(
        "FastAPI + transformers generate",
        _TRANSFORMERS,
        ("transformers", "fastapi", "uvicorn"),
        Endpoint("/caption", None),
    ),
    "transformers-1-thread": Peer(
        "the same, set_num_threads(1)",
        _TRANSFORMERS,
        ("transformers", "fastapi", "uvicorn"),
        Endpoint("/caption", None),
        ("--threads", "1"),
    ),
    "transformers-compile": Peer(
        "FastAPI + transformers, torch.compile",
        _TRANSFORMERS,
        ("transformers", "fastapi", "uvicorn"),
        Endpoint("/caption", None),
        ("--compile",),
        compiles=True,
    ),
    "litserve": Peer(
        "LitServe + transformers generate",
        _LITSERVE,
        ("transformers", "litserve"),
        Endpoint("/caption", "/health", json=True),
    ),
}
