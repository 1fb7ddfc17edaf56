"""Decides by OpenTelemetry's standard variables whether requests are traced, and imports it only where they are."""

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER = "OTEL_TRACES_EXPORTER"
_logger = logging.getLogger("snapcap.server")

# Name, begin and end of what was done for a request, in moments of `time.monotonic`.
Span = tuple[str, float, float]


class RequestSpan(Protocol):
    """The span of one request, from its begin to its end."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""

    def end(self, name: str, status: int, attributes: Mapping[str, str | int], parts: Iterable[Span]) -> None:
        """It has been answered. `parts` are spans under it."""


class Tracing(Protocol):
    """Makes spans, and exports them on a thread of its own."""

    def begin(self, method: str, headers: Mapping[str, str]) -> RequestSpan:
        """A span under the one that the headers name, if they do."""

    def close(self) -> None:
        """Export what is left, for a moment."""


def open_tracing(environ: Mapping[str, str]) -> Tracing | None:
    """What traces requests, or None: nothing asks for it, or it cannot be had, which the log says."""
    if not _is_wanted(environ):
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        _not_traced(f"{protocol} is not supported; set {_PROTOCOLS[1]}=http/protobuf")
        return None
    try:
        from snapcap.service.telemetry.otel import OtelTracing  # noqa: PLC0415 - few servers are traced

        tracing = OtelTracing()
    except ImportError as error:
        _not_traced(f"{error}; pip install 'snapcap[otel]'")
    except Exception as error:  # a variable that OpenTelemetry cannot read
        _not_traced(f"{type(error).__name__}: {error}")
    else:
        endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), "the default endpoint")
        _logger.info("tracing", extra={"fields": {"to": _without_credentials(endpoint)}})
        return tracing
    return None


def _is_wanted(environ: Mapping[str, str]) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = {name.strip() for name in environ.get(_EXPORTER, "").split(",")} - {""}
    if not exporters:
        return any(environ.get(name) for name in _ENDPOINTS)
    if exporters == {"otlp"}:
        return True
    if exporters != {"none"}:
        _not_traced(f"{_EXPORTER}={environ[_EXPORTER]} is not supported; set it to otlp")
    return False


def _without_credentials(endpoint: str) -> str:
    """An address as a log may have it: without the user and the password that stand before its host."""
    scheme, separator, rest = endpoint.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def _not_traced(why: str) -> None:
    _logger.warning("requests are not traced", extra={"fields": {"why": why}})
