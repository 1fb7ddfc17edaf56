"""Writes the headers by which a page of another origin may read a reply that the application did not write.

What the application answers has them from `cross_origin.py`. This module imports nothing.
"""

from collections.abc import Collection, Mapping

EVERY_ORIGIN = "*"


def origin_headers(origin: bytes | None, allowed: Collection[str]) -> Mapping[str, str]:
    """For a reply that says nothing but why a request is refused, as far as its `Origin` is known by then.

    Args:
        origin: the value of that header; None where there is none, or its head has not come so far.
        allowed: as `scheme://host:port`, or "*" for every one.
    """
    if EVERY_ORIGIN in allowed:
        return {"access-control-allow-origin": EVERY_ORIGIN}
    if not allowed:
        return {}
    text = "" if origin is None else origin.decode("latin-1")
    shown = {"access-control-allow-origin": text} if text in allowed else {}
    return {**shown, "vary": "Origin"}
