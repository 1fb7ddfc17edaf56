"""Describes a peer: how it is started and asked, and what it needs."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

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

    def unavailable(self, workload: Workload, device: str) -> str:
        """Why it cannot be measured here; empty where it can."""
        missing = self.missing
        return f"not installed: {', '.join(missing)}" if missing else ""

    def prepare(self, workload: Workload, sets: Path) -> None:
        """Make what a start needs and does not make itself, in the folder of artifact sets; most need nothing."""

    def model(self, workload: Workload, sets: Path) -> Path:
        """The folder that it serves."""
        return workload.folder

    def command(self, workload: Workload, device: str, sets: Path) -> tuple[str, ...]:
        model = ("--model", str(self.model(workload, sets)), "--device", device)
        return (sys.executable, "-m", self.module, *model, *self.options)

    @property
    def missing(self) -> list[str]:
        """The packages it needs that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]
