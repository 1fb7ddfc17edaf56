"""Decides by OpenTelemetry's standard variables if requests are traced, and only then imports OpenTelemetry.

Parses `traceparent`, the header by which callers say which trace a request belongs to (W3C Trace Context).
"""

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapcap.service.telemetry.otel import OtelTracing

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER = "OTEL_TRACES_EXPORTER"
_logger = logging.getLogger("snapcap.server")
# A part of a request: its name, and its begin and end as moments of `time.monotonic`.
Span = tuple[str, float, float]
TRACEPARENT = b"traceparent"
TRACE_ID_HEADER = "X-Trace-Id"  # a header of replies
# Later versions may have more fields. The version ff and ids of zeros are not valid.
_VALID = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,256})?"
)


def open_tracing(environ: Mapping[str, str]) -> "OtelTracing | None":
    """Returns the tracing of requests, or None if no variable asks for it. Logs the reason and returns None if
    traces cannot be exported."""
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
        _logger.info("tracing", extra={"fields": {"to": without_credentials(endpoint)}})
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


def without_credentials(url: str) -> str:
    """Returns a URL for logs and messages: without the user and password before its host, and without its query,
    which may have a key."""
    scheme, separator, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def _not_traced(why: str) -> None:
    _logger.warning("requests are not traced", extra={"fields": {"why": why}})


def trace_id_of(value: bytes) -> str | None:
    """Returns the trace id in a header's value, or None if the value is not valid and so to be ignored."""
    found = _VALID.fullmatch(value)
    if found is None or (found[1] == b"00" and found[3] is not None):
        return None
    return found[2].decode("ascii")
