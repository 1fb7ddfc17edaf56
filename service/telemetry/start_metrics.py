"""Collects the metrics of the start and of the process at scrape time, from the records of the start."""

import platform
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from snapcap.models.dataclass import dataclass
from snapcap.service.readiness import Readiness, State
from snapcap.warmup.progress.status import BUILD_RESULTS, StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.version import snapcap_version

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)
Samples = Iterable[tuple[tuple[str, ...], float]]
_MARKS = {
    "live": "until the port was bound and /livez could answer",
    "ready": "until /readyz answered 200",
    "first_caption": "until the first caption was served",
}
# Labels whose counters begin at 0, so that Prometheus sees the first event: increase() needs a value before it. The
# labels are repeated here because importing the modules that define them would delay the first /livez. A test holds
# that both are equal.
FETCH_RESULTS = ("hit", "miss", "stale", "corrupt", "untrusted", "error")
PUBLISH_RESULTS = ("published", "exists", "denied", "error")
SWAP_RESULTS = ("swapped", "mismatch", "failed")


class ModelsCollector(Collector):
    """Collects the metrics of several models, each with the label `model`."""

    def __init__(self, registries: Callable[[], Iterable[tuple[str, CollectorRegistry]]]) -> None:
        """`registries` returns the registries of the models, each with the name of its model."""
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, registry in self._registries():
            for each in registry.collect():
                family = families.setdefault(each.name, Metric(each.name, each.documentation, each.type))
                family.samples += [
                    sample._replace(labels={"model": model, **sample.labels}) for sample in each.samples
                ]
        yield from families.values()


@dataclass(eq=False)
class StartupCollector(Collector):
    """Collects the metrics of the start. `model_name` returns the model's name once it is loaded.

    In a server of several models, one collector has the metrics of the server (`of_server`), and one for each start
    of a model has the rest (`of_model`)."""

    timeline: Timeline
    status: StartupStatus
    readiness: Readiness
    model_name: Callable[[], str | None]
    of_server: bool = True
    of_model: bool = True

    def collect(self) -> Iterator[Metric]:
        if self.of_server:
            yield _info("build_info", "Versions of snapcap, Python and torch.", _versions())
            yield from self._lifecycle()
        if self.of_model:
            yield from self._phases()
            yield from self._buckets()
            yield from self._artifacts()

    def _lifecycle(self) -> Iterator[Metric]:
        current = self.readiness.state
        states = (((each.value,), float(each is current)) for each in State)
        yield _gauge("lifecycle_state", "1 for the state the process is in.", ("state",), states)
        ready = float(current is State.READY)
        yield GaugeMetricFamily("snapcap_ready", "1 when /readyz answers 200.", value=ready)
        marks = self.timeline.marks()
        for mark, text in _MARKS.items():
            if mark in marks:
                name = f"snapcap_process_start_to_{mark}_seconds"
                yield GaugeMetricFamily(name, f"Seconds from exec of the process {text}.", value=marks[mark])

    def _phases(self) -> Iterator[Metric]:
        now = self.timeline.now()
        seconds: dict[tuple[str, ...], float] = {}
        for phase in self.timeline.phases():
            end = now if phase.end is None else phase.end
            seconds[phase.name,] = seconds.get((phase.name,), 0.0) + end - phase.start
        text = "Seconds of each phase of the start, so far when it still runs. Phases overlap."
        yield _gauge("startup_phase_duration_seconds", text, ("phase",), seconds.items())

    def _buckets(self) -> Iterator[Metric]:
        status = self.status.to_dict()
        model = self.model_name()
        if model is not None:
            labels = {"model": model, "device": str(status["device"]), "dtype": str(status["dtype"])}
            yield _info("model_info", "The model that is loaded.", labels)
        if self.status.state.tier is not None:
            labels = {"backend": self.status.state.tier}
            yield _info("startup_tier", "1 for the backend that the start ended with.", labels)
        yield GaugeMetricFamily(
            "snapcap_torch_modules",
            "Python modules of torch in the server's processes; 0 where compiled packages run without them.",
            value=self.status.compiler().modules,
        )
        if self.status.state.weights is not None:
            labels = {"result": self.status.state.weights.result}
            yield _info("startup_weights", "1 for the result of the lookup of prepared weights.", labels)
        buckets = self.status.buckets()
        text = "Seconds it took to make a bucket (rows) ready."
        warmed = {(each.component, str(each.size)): each.seconds for each in buckets if each.seconds is not None}
        yield _gauge("warmup_bucket_duration_seconds", text, ("component", "bucket"), warmed.items())
        expected, completed = len(buckets), sum(bucket.state not in ("pending", "failed") for bucket in buckets)
        yield GaugeMetricFamily("snapcap_warmup_buckets_expected", "Buckets to make ready.", value=expected)
        yield GaugeMetricFamily("snapcap_warmup_buckets_completed", "Buckets that are ready.", value=completed)

    def _artifacts(self) -> Iterator[Metric]:
        fetch = self.status.state.fetch
        if fetch is not None:
            yield GaugeMetricFamily(
                "snapcap_artifact_fetch_duration_seconds", "Seconds of the last lookup of artifacts.", fetch.seconds
            )
            yield GaugeMetricFamily(
                "snapcap_artifact_fetch_bytes",
                "Bytes that the last lookup of artifacts downloaded; 0 from a folder.",
                fetch.bytes_fetched,
            )
        yield self._counter(
            "artifact_requests",
            "Lookups of artifacts, by kind (aot, jit) and result.",
            ("kind", "result"),
            product(("aot", "jit"), FETCH_RESULTS),
        )
        yield self._counter(
            "artifact_publish", "Artifact sets published, by result.", ("result",), product(PUBLISH_RESULTS)
        )
        yield self._counter(
            "builds",
            "Builds of artifacts that ended in this server, by result: published; fetched, because another server "
            "was faster; failed; declined, because this server may not publish.",
            ("result",),
            product(BUILD_RESULTS),
        )
        yield self._counter(
            "bucket_swaps",
            "Swaps of buckets to compiled code while serving, by result: after a mismatch of results or a failure "
            "the bucket stays eager.",
            ("result",),
            product(SWAP_RESULTS),
        )
        yield self._counter(
            "eager_fallbacks",
            "Calls of the jit backend that ran eager because none of the region's graphs fitted.",
            ("region", "bucket"),
        )
        looked_up = zip((("hit",), ("miss",), ("bypass",)), self.status.compiler().caches, strict=True)
        text = "Lookups of the jit backend in torch's compile caches."
        yield _filled(CounterMetricFamily("snapcap_compile_cache", text, labels=["result"]), looked_up)
        compiled = {(when,): count for when, count in self.status.compile_events().items()}
        text = "Graphs compiled, before and after READY."
        yield _filled(CounterMetricFamily("snapcap_compile_events", text, labels=["when"]), compiled.items())

    def _counter(
        self, name: str, text: str, labels: tuple[str, ...], known: Iterable[tuple[str, ...]] = ()
    ) -> Metric:
        """Returns a counter. `known` has the values of its labels whose series begin at 0."""
        samples = {**dict.fromkeys(known, 0), **self.status.counts(name)}
        return _filled(CounterMetricFamily(f"snapcap_{name}", text, labels=list(labels)), samples.items())


def register_process_collectors(registry: CollectorRegistry) -> None:
    """Registers the usual process_*, python_info and python_gc_* metrics."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)


def _info(name: str, text: str, labels: dict[str, str]) -> Metric:
    return _gauge(name, text, tuple(labels), [(tuple(labels.values()), 1.0)])


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"snapcap_{name}", text, labels=list(labels)), samples)


def _filled(family: Family, samples: Samples) -> Family:
    """Adds samples by the values of their labels to a family, and returns it."""
    for values, value in samples:
        family.add_metric(list(values), value)
    return family


def _versions() -> dict[str, str]:
    from importlib.metadata import version  # noqa: PLC0415  takes a fiftieth of a start, and only scrapes need it

    # The versions are the packages' metadata, so that a scrape during the start does not wait for torch's import.
    return {"version": snapcap_version(), "python": platform.python_version(), "torch": version("torch")}
