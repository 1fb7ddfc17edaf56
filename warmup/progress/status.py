"""Records the progress of the start and of background builds, for `/startup` and the metrics. Imports no torch.

The counts of torch's Python modules and of compiled graphs are read from the modules that this process has
imported.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from snapcap.models.dataclass import dataclass

if TYPE_CHECKING:
    from snapcap.warmup.artifacts.fetch import Artifacts


class CacheCounts(NamedTuple):
    """Counts lookups in torch's compile caches, of whole graphs (AOTAutograd) and of their code (Inductor).

    ``bypasses``: graphs that torch cannot cache at all."""

    hits: int = 0
    misses: int = 0
    bypasses: int = 0


class CompilerCounts(NamedTuple):
    """Counts compiled graphs, cache lookups and torch's Python modules; 0 if packages run without torch."""

    graphs: int = 0
    caches: CacheCounts = CacheCounts()
    modules: int = 0


def compiler_counts() -> CompilerCounts:
    """Returns the compiler's counts in this process."""
    return CompilerCounts(compiled_graphs(), cache_counts(), torch_modules())


def torch_modules() -> int:
    """Returns the number of imported modules of torch, including submodules."""
    return sum(name == "torch" or name.startswith("torch.") for name in list(sys.modules))


def compiled_graphs() -> int:
    """Returns the number of graphs that Dynamo has compiled; 0 without Dynamo, as in every aot and eager server."""
    return int(_counters().get("stats", {}).get("unique_graphs", 0))


def cache_counts() -> CacheCounts:
    """Returns the hits and misses of Dynamo's caches; zeros if nothing was compiled."""
    counters = _counters()
    caches = (("aot_autograd", "autograd_cache"), ("inductor", "fxgraph_cache"))
    return CacheCounts(
        *(
            sum(int(counters.get(group, {}).get(f"{cache}_{result}", 0)) for group, cache in caches)
            for result in ("hit", "miss", "bypass")
        )
    )


def _counters() -> Mapping[str, Mapping[str, Any]]:
    utils = sys.modules.get("torch._dynamo.utils")
    return {} if utils is None else utils.counters


BucketState = Literal["pending", "eager", "loaded", "warm", "captured", "failed"]
ComponentName = Literal["encoder", "decoder"]
COMPONENTS: tuple[ComponentName, ...] = ("encoder", "decoder")


@dataclass(frozen=True)
class BucketStatus:
    """Holds the state of a component's bucket. Its warm-up took ``seconds``, from ``start`` seconds after exec."""

    component: ComponentName
    size: int
    state: BucketState = "pending"
    backend: str = ""
    seconds: float | None = None
    start: float | None = None


# Results of a build. "fetched": another server has published the set; "declined": this server may not publish.
BUILD_RESULTS = ("published", "fetched", "failed", "declined")


@dataclass(frozen=True)
class FetchStatus:
    """Holds the result of the lookup of artifacts."""

    kind: str
    result: str
    reason: str
    key: str
    seconds: float
    bytes_fetched: int


@dataclass(frozen=True)
class WeightsStatus:
    """Holds the result of the lookup of prepared weights: hit, miss, corrupt, untrusted, error or off. Except after
    a hit, the start reads the checkpoint. ``bytes_fetched``: bytes downloaded from a store."""

    result: str
    reason: str
    bytes_fetched: int = 0


@dataclass
class StatusState:
    """Holds the data of a status, in the form that is sent to another process."""

    device: str | None = None
    dtype: str | None = None
    tier: str | None = None  # the backend that the start ended with; a build that swaps buckets later keeps it
    compiled: int | None = None
    error: str | None = None
    weights: WeightsStatus | None = None
    fetch: FetchStatus | None = None
    build: dict[str, Any] | None = None
    tested: str = ""  # identifies the packages and weights with which the model has passed its self-test
    buckets: dict[tuple[str, int], BucketStatus] = field(default_factory=dict)
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)


class StartupStatus:
    """Collects the status of a start. Thread-safe. Callers must not change ``state``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.state = StatusState()
        self.compiler = compiler_counts  # also of the engine process, once that is known
        self._listeners: list[Callable[[StatusState], None]] = []

    def listen(self, listener: Callable[[StatusState], None]) -> None:
        """Call ``listener`` with the state after each change, in order. The listener must not keep the state, nor
        call this object."""
        with self._lock:
            self._listeners.append(listener)

    def restore(self, state: StatusState) -> None:
        """Replace the state by a state that another status passed to its listener."""
        with self._changed():
            self.state = state

    def compiled_elsewhere(self, counts: CompilerCounts) -> None:
        """Take over the compiler's counts of the engine process. torch's modules are the sum of both processes."""
        self.compiler = lambda: counts._replace(modules=counts.modules + torch_modules())

    @contextmanager
    def _changed(self) -> Iterator[None]:
        with self._lock:
            yield
            for listener in self._listeners:
                listener(self.state)

    @property
    def backend(self) -> str | None:
        """The serving backend: ``mixed`` if buckets have different ones; None before a bucket is warm."""
        names = {bucket.backend for bucket in self.buckets() if bucket.state != "pending"}
        return "mixed" if len(names) > 1 else next(iter(names), None)

    def expect(self, sizes: tuple[int, ...], device: str, dtype: str, step_sizes: tuple[int, ...] = ()) -> None:
        """Set every bucket to pending: ``sizes`` of both components, and ``step_sizes`` of the decoder alone."""
        with self._changed():
            self.state.device, self.state.dtype = device, dtype
            for component in COMPONENTS:
                for size in (*sizes, *(step_sizes if component == "decoder" else ())):
                    self.state.buckets[component, size] = BucketStatus(component, size)

    def started(self) -> None:
        """Record the end of the start: the present backend is its tier."""
        tier, compiled = self.backend, self.compiler().graphs
        with self._changed():
            self.state.tier, self.state.compiled = tier, compiled

    def compile_events(self) -> dict[str, int]:
        """Returns the number of graphs compiled during the start, and since."""
        total, before = self.compiler().graphs, self.state.compiled
        return {"startup": total if before is None else before, "serving": 0 if before is None else total - before}

    def fetched(self, artifacts: "Artifacts") -> None:
        fetched = artifacts.fetched
        kind = str(artifacts.factors.get("kind"))
        with self._changed():
            self.state.fetch = FetchStatus(
                kind, fetched.result, fetched.reason, artifacts.key, fetched.seconds, fetched.bytes_fetched
            )
            self.state.counts["artifact_requests", kind, fetched.result] += 1

    def found_weights(self, result: str, reason: str, bytes_fetched: int = 0) -> None:
        with self._changed():
            self.state.weights = WeightsStatus(result, reason, bytes_fetched)

    def passed(self, tested: str) -> None:
        with self._changed():
            self.state.tested = tested

    def count(self, name: str, *labels: str) -> None:
        """Adds 1 to a counter: ``artifact_publish``, ``bucket_swaps`` or ``eager_fallbacks``."""
        with self._changed():
            self.state.counts[name, *labels] += 1

    def swapped(self, result: Literal["swapped", "mismatch", "failed"]) -> None:
        self.count("bucket_swaps", result)

    def building(self, **progress: Any) -> None:
        """Update members of the background build's progress. Other members keep their values."""
        with self._changed():
            self.state.build = {**(self.state.build or {}), **progress}
            if progress.get("state") in BUILD_RESULTS:
                self.state.counts["builds", progress["state"]] += 1

    @property
    def is_building(self) -> bool:
        """True while a background build runs. False while it waits for another build."""
        return (self.state.build or {}).get("state") == "building"

    def counts(self, name: str) -> dict[tuple[str, ...], int]:
        """Returns a counter's values by its labels."""
        with self._lock:
            return {labels[1:]: count for labels, count in self.state.counts.items() if labels[0] == name}

    def fail(self, error: str) -> None:
        with self._changed():
            self.state.error = error

    def update(
        self,
        component: ComponentName,
        size: int,
        state: BucketState,
        backend: str,
        seconds: float | None = None,
        start: float | None = None,
    ) -> None:
        """Set the state and backend of a bucket. Without ``seconds`` and ``start`` its warm-up times stay."""
        with self._changed():
            known = self.state.buckets.get((component, size), BucketStatus(component, size))
            self.state.buckets[component, size] = replace(
                known,
                state=state,
                backend=backend,
                seconds=known.seconds if seconds is None else seconds,
                start=known.start if start is None else start,
            )

    def bucket(self, component: ComponentName, size: int) -> BucketStatus:
        with self._lock:
            return self.state.buckets[component, size]

    def decoder_backend(self, size: int) -> str:
        """Returns the backend that runs the decode step of this bucket."""
        return self.bucket("decoder", size).backend

    def buckets(self) -> list[BucketStatus]:
        """Returns the buckets: the encoder's first, in ascending sizes."""
        with self._lock:
            buckets = self.state.buckets.values()
            return sorted(buckets, key=lambda b: (b.component != "encoder", b.size))

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `/startup` without the timeline."""
        state = self.state
        return {
            "backend": self.backend,
            "tier": state.tier,
            "device": state.device,
            "dtype": state.dtype,
            "error": state.error,
            "compile_events": self.compile_events(),
            "torch_modules": self.compiler().modules,
            "weights": None if state.weights is None else asdict(state.weights),
            "artifacts": None if state.fetch is None else asdict(state.fetch),
            "build": state.build,
            "buckets": [asdict(bucket) for bucket in self.buckets()],
        }
