"""Traces requests with OpenTelemetry: a span for each request and for its parts, exported by OTLP over HTTP.

Sampling, batching, headers and time limits follow the OTEL_… variables, which OpenTelemetry's SDK reads. Only
`tracing.py` imports this module, and only if a variable asks for traces.
"""

import threading
import time
from collections.abc import Iterable, Mapping

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context

from snapcap.service.telemetry.tracing import Span as Part
from snapcap.warmup.version import snapcap_version

# Seconds that an exit waits for the spans of the last requests to be exported: the collector may be gone.
_CLOSE_S = 3.0


class OtelTracing:
    """Makes spans and exports them with `exporter`, or by OTLP over HTTP to the endpoint that the variables name.
    Raises OpenTelemetry's error for a variable that cannot be read."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        ours = Resource({SERVICE_NAME: "snapcap", SERVICE_VERSION: snapcap_version()})
        named = ours.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        self._provider = TracerProvider(resource=Resource.create(dict(named.attributes)), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("snapcap", snapcap_version())

    def begin(self, method: str, headers: Mapping[str, str]) -> "OtelSpan":
        """Begins a span, under the caller's span if the headers name one."""
        parent = propagate.extract(headers)
        return OtelSpan(self._tracer, self._tracer.start_span(method, parent, SpanKind.SERVER))

    def close(self) -> None:
        """Exports the remaining spans, for a few seconds at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="otel", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)


class OtelSpan:
    """The span of one request, from its begin to its end."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def trace_id(self) -> str:
        """Returns the id of the trace, 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def end(self, name: str, status: int, attributes: Mapping[str, str | int], parts: Iterable[Part]) -> None:
        """Ends the span of a request that has been answered. `parts` become spans under it."""
        if self._span.is_recording():
            self._span.update_name(name)
            self._span.set_attributes({"http.response.status_code": status, **attributes})
            if status >= 500:
                self._span.set_status(StatusCode.ERROR)
            zero = time.time_ns() - time.monotonic_ns()
            within = set_span_in_context(self._span)
            for part, began, ended in parts:
                span = self._tracer.start_span(part, within, start_time=zero + round(began * 1e9))
                span.end(zero + round(ended * 1e9))
        self._span.end()
