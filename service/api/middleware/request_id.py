"""Gives each request its id: the client's if it is usable, else a new one.

What answers a request and what logs it import this, on a connection too.
"""

import random
import re

from starlette.types import Scope

HEADER = "X-Request-Id"
_VISIBLE_ASCII = re.compile(rb"[\x21-\x7e]{1,128}")


def identify(scope: Scope) -> str:
    """Gives the request its id and returns it."""
    # Not os.urandom: a system call lets go of Python's lock, and then waits behind the decode threads for it.
    identity = _accepted(scope) or f"{random.getrandbits(128):032x}"
    scope.setdefault("state", {})["request_id"] = identity
    return identity


def request_id(scope: Scope) -> str:
    """The id that the request was given."""
    value: str = scope["state"]["request_id"]
    return value


def _accepted(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode("ascii") if _VISIBLE_ASCII.fullmatch(value) else None
    return None
