"""Gives each request its id: the client's if it is usable, else a new one; and the trace that its caller names.

What answers a request and what logs it import this, on a connection too.
"""

import random
import re

from starlette.types import Scope

from snapcap.service.telemetry.trace_context import HEADER as TRACEPARENT
from snapcap.service.telemetry.trace_context import trace_id_of

HEADER = "X-Request-Id"
_VISIBLE_ASCII = re.compile(rb"[\x21-\x7e]{1,128}")


def identify(scope: Scope) -> str:
    """Gives the request its id and returns it."""
    given: bytes | None = None
    parents: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = given or value
        elif name == TRACEPARENT:
            parents.append(value)
    state = scope.setdefault("state", {})
    if len(parents) == 1:  # of several none is to be believed
        state["trace_id"] = trace_id_of(parents[0])
    # Not os.urandom: a system call lets go of Python's lock, and then waits behind the decode threads for it.
    usable = given is not None and _VISIBLE_ASCII.fullmatch(given)
    identity = given.decode("ascii") if given is not None and usable else f"{random.getrandbits(128):032x}"
    state["request_id"] = identity
    return identity


def request_id(scope: Scope) -> str:
    """The id that the request was given."""
    value: str = scope["state"]["request_id"]
    return value


def trace_id(scope: Scope) -> str | None:
    """The trace that the request belongs to, if it does to one: 32 hexadecimal digits."""
    value: str | None = scope["state"].get("trace_id")
    return value
