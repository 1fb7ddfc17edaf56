"""Parses `traceparent`, the header by which callers say which trace a request belongs to (W3C Trace Context)."""

import re

HEADER = b"traceparent"
TRACE_ID_HEADER = "X-Trace-Id"  # of replies
# Later versions may have more fields; no version is ff, and an id of zeros is none.
_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,256})?"
)


def trace_id_of(value: bytes) -> str | None:
    """The trace id of a header's value, or None where it is not valid: then it is to be ignored."""
    found = _TRACEPARENT.fullmatch(value)
    if found is None or (found[1] == b"00" and found[3] is not None):
        return None
    return found[2].decode("ascii")
