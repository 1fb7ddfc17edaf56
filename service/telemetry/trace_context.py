"""Parses `traceparent`, the header by which callers say which trace a request belongs to (W3C Trace Context)."""

import re

HEADER = b"traceparent"
TRACE_ID_HEADER = "X-Trace-Id"  # a header of replies
# Later versions may have more fields. The version ff and ids of zeros are not valid.
_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,256})?"
)


def trace_id_of(value: bytes) -> str | None:
    """Returns the trace id in a header's value, or None if the value is not valid and so to be ignored."""
    found = _TRACEPARENT.fullmatch(value)
    if found is None or (found[1] == b"00" and found[3] is not None):
        return None
    return found[2].decode("ascii")
