"""Records the metrics that code observes, on an injected registry. `start_metrics.py` has the metrics of the start.

The engine's `Work` has the counts and durations of steps, rows and tokens. The start sets
`device_memory_allocated`. The captioner sets `queue_depth`, `queue_capacity` and `image_decode*`. The scope of a
request counts the `request*` metrics.
"""

from typing import Any, Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from snapcap.service.errors import ServiceError
from snapcap.service.limits import REJECTED
from snapcap.service.telemetry.work import Work
from snapcap.warmup.progress.status import COMPONENTS

_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_DECODE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Instrument = TypeVar("Instrument", Counter, Histogram)
# The reasons for which the server kills a decode process.
Why = Literal[
    "deadline", "too_complex", "client_left", "hung", "bad_answer", "broken", "idle", "threads", "refusals"
]
# The reasons for which a connection is refused, or closed because of its client.
CLOSED = (
    "malformed",
    "head_too_large",
    "head_timeout",
    "body_left_over",
    "send_timeout",
    "max_connections",
    "made_room",
    "grace_period",
)


class Metrics:
    """Holds the instruments. Each attribute has the name on /metrics without the prefix `snapcap_` and the unit."""

    def __init__(self, registry: CollectorRegistry, of_model: CollectorRegistry | None = None) -> None:
        """Registers the instruments. `of_model` is the registry of the instruments that each model of a server of
        several models has; None: the same registry."""
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"snapcap_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"snapcap_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"snapcap_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests = counter("requests_total", "HTTP requests answered, by API and status.", "api", "code")
        self.request_duration = histogram(
            "request_duration_seconds",
            "Seconds from the head of a request until the end of its reply, for APIs that caption.",
            _REQUEST_S,
            "api",
        )
        self.requests_in_flight = gauge("requests_in_flight", "Caption requests that are being processed.")
        self.requests_rejected = counter(
            "requests_rejected_total", f"Caption requests given up, by reason: {', '.join(REJECTED)}.", "reason"
        )
        self.connections = gauge("http_connections", "Connections that are open.")
        self.connections_closed = counter(
            "http_connections_closed_total",
            "Connections that the server refused or closed because of their clients or of a limit, by reason.",
            "reason",
        )
        self.body_memory = gauge("body_memory_bytes", "Bytes that request bodies hold.")
        self.body_memory_limit = gauge(
            "body_memory_limit_bytes", "Bytes that request bodies may hold; beyond it 429 body_memory_full."
        )
        self.of_model = registry = of_model or registry
        self.queue_wait = histogram(
            "queue_wait_seconds", "Seconds a request waited before its image was encoded.", _WAIT_S
        )
        self.queue_depth = gauge(
            "queue_depth", "Images in the queue: they have arrived, and the device does not have them yet."
        )
        self.queue_capacity = gauge("queue_capacity", "Images that the queue holds; beyond it 429 queue_full.")
        self.engine_progress_age = gauge(
            "engine_progress_age_seconds",
            "Seconds without progress of the engine: no step while it has work, or no answer when idle.",
        )
        self.encode_batch_size = histogram(
            "encode_batch_size", "Real rows of an encoder batch, padding not counted.", _ROWS
        )
        self.decode_batch_size = histogram(
            "decode_batch_size", "Real rows of a decode step, padding not counted.", _ROWS
        )
        self.rows = counter("rows_total", "Rows run, padding included.", "component")
        self.padding_rows = counter("padding_rows_total", "Rows run that were padding.", "component")
        self.step_duration = histogram(
            "step_duration_seconds",
            "Seconds of one encoder batch or one decode step, by bucket (rows, padding included).",
            _STEP_S,
            "component",
            "bucket",
        )
        self.generated_tokens = counter("generated_tokens_total", "Tokens generated, prompts not counted.")
        self.device_memory_allocated = gauge(
            "device_memory_allocated_bytes", "Bytes allocated on the device; 0 on a CPU."
        )
        self.image_decode = histogram(
            "image_decode_seconds", "Seconds to decode and resize an image, by format.", _DECODE_S, "format"
        )
        self.image_decode_failures = counter(
            "image_decode_failures_total", "Images that could not be decoded, by reason.", "reason"
        )
        self.decode_processes = gauge("decode_processes", "Processes that decode images.")
        self.decode_process_deaths = counter(
            "decode_process_deaths_total", "Decode processes that ended by themselves and were replaced."
        )
        self.decode_processes_killed = counter(
            "decode_processes_killed_total",
            f"Decode processes that the server ended and replaced, by reason: {', '.join(get_args(Why))}.",
            "reason",
        )
        # A counter that appears with its first event hides that event from Prometheus, whose increase() and rate()
        # need a value before it.
        for code in REJECTED:
            self.requests_rejected.labels(code)
        for why in get_args(Why):
            self.decode_processes_killed.labels(why)
        for reason in CLOSED:
            self.connections_closed.labels(reason)
        for component in COMPONENTS:
            self.rows.labels(component)
            self.padding_rows.labels(component)

    def request_ended(self, api: str, status: int, seconds: float, *, captions: bool) -> None:
        """Counts a request under the label of its API. The duration is recorded if the API captions: a histogram
        for each probe and page would add 14 series."""
        self._child(self.requests, api, str(status)).inc()
        if captions:
            self._child(self.request_duration, api).observe(seconds)

    def connection_closed(self, reason: str) -> None:
        """Counts a closed or refused connection under a reason of `CLOSED`."""
        self.connections_closed.labels(reason).inc()

    def image_decoded(self, kind: str, seconds: float) -> None:
        """Records the seconds that an image's decode took, under its format."""
        self._child(self.image_decode, kind).observe(seconds)

    def worked(self, work: Work) -> None:
        """Counts and records the work of the engine."""
        for seconds in work.waited:
            self.queue_wait.observe(seconds)
        for batch in work.encodes:
            self._ran("encoder", self.encode_batch_size, *batch)
        self._ran("decoder", self.decode_batch_size, *work.step)
        self.generated_tokens.inc(work.generated)

    def _ran(self, component: str, sizes: Histogram, bucket: int, rows: int, seconds: float) -> None:
        sizes.observe(rows)
        self._child(self.rows, component).inc(bucket)
        self._child(self.padding_rows, component).inc(bucket - rows)
        self._child(self.step_duration, component, str(bucket)).observe(seconds)

    def _child(self, parent: Instrument, *labels: str) -> Instrument:
        """Returns the parent's child for these labels, from a cache: `labels` takes longer than counting does."""
        key = (parent, labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = parent.labels(*labels)
        return child

    def count_rejection(self, error: ServiceError) -> None:
        """Counts an error as a rejection, unless it is a mistake in the client's request."""
        if error.code in REJECTED:
            self.requests_rejected.labels(error.code).inc()
