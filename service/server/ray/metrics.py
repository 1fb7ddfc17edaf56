"""Exports a replica's metrics through Ray, on each node, with the replica's name as a label.

A scrape of /metrics would reach a different replica each time, if the application has several.
"""

import threading

from prometheus_client import CollectorRegistry
from ray.serve.metrics import Gauge

_SECONDS = 5.0


class RayMetrics:
    """Copies every sample to a gauge in a thread. Ray puts `ray_` before its name. Queries compute rates and
    quantiles of such a gauge as of the copied counter or histogram."""

    def __init__(self, registry: CollectorRegistry, seconds: float = _SECONDS) -> None:
        self._registry = registry
        self._seconds = seconds
        self._gauges: dict[str, Gauge] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def copy(self) -> None:
        """Copies every sample's present value."""
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name not in self._gauges:
                    self._gauges[sample.name] = Gauge(
                        sample.name, description=family.documentation, tag_keys=tuple(sample.labels)
                    )
                self._gauges[sample.name].set(sample.value, tags=dict(sample.labels))

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self.copy()
