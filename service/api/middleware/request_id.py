"""Gives each request its id, and reads the id of the trace that the client names.

The client's X-Request-Id is the id if it is valid; otherwise the id is random.
"""

import random
import re

from starlette.types import Scope

from snapcap.service.telemetry.trace_context import HEADER as TRACEPARENT
from snapcap.service.telemetry.trace_context import trace_id_of

HEADER = "X-Request-Id"
_VISIBLE_ASCII = re.compile(rb"[\x21-\x7e]{1,128}")


def identify(scope: Scope) -> str:
    """Gives the request an id and returns the id. Notes the trace id of the `traceparent` header."""
    given: bytes | None = None
    parents: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = given or value
        elif name == TRACEPARENT:
            parents.append(value)
    state = scope.setdefault("state", {})
    if len(parents) == 1:  # several headers contradict each other, so none is used
        state["trace_id"] = trace_id_of(parents[0])
    # os.urandom is a system call that releases Python's lock, and would wait for the decode threads to get it back.
    usable = given is not None and _VISIBLE_ASCII.fullmatch(given)
    identity = given.decode("ascii") if given is not None and usable else f"{random.getrandbits(128):032x}"
    state["request_id"] = identity
    return identity


def request_id(scope: Scope) -> str:
    """Returns the id that `identify` gave the request."""
    value: str = scope["state"]["request_id"]
    return value


def trace_id(scope: Scope) -> str | None:
    """Returns the id of the trace that the request belongs to, 32 hexadecimal digits, or None without a trace."""
    value: str | None = scope["state"].get("trace_id")
    return value
