"""Describes a peer: its command, its API, and the packages it needs."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from snapcap.benchmarks.harness.server import Endpoint
from snapcap.benchmarks.harness.workload import Workload


@dataclass(frozen=True)
class Peer:
    """A server that is not snapcap."""

    title: str
    module: str
    needs: tuple[str, ...]
    api: Endpoint
    options: tuple[str, ...] = ()

    def unavailable(self, workload: Workload, device: str) -> str:
        """Returns why the peer cannot be measured here, or an empty text if it can."""
        missing = self.missing
        return f"not installed: {', '.join(missing)}" if missing else ""

    def prepare(self, workload: Workload, sets: Path) -> None:
        """Makes files that a start needs and does not make itself, in the folder of artifact sets. Most peers need
        none."""

    def model(self, workload: Workload, sets: Path) -> Path:
        """Returns the folder that the peer serves."""
        return workload.folder

    def command(self, workload: Workload, device: str, sets: Path) -> tuple[str, ...]:
        model = ("--model", str(self.model(workload, sets)), "--device", device)
        return (sys.executable, "-m", self.module, *model, *self.options)

    @property
    def missing(self) -> list[str]:
        """The packages that the peer needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]
