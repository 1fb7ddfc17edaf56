"""Writes replies of JSON."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

_TYPE = (b"content-type", b"application/json")


class JsonReply(Response):
    """A JSONResponse of status 200 whose head is not put together from a mapping of headers."""

    def __init__(self, content: Mapping[str, Any] | list[Any]) -> None:
        # Not the base class's: all that it would do is here.
        self.status_code = 200
        self.background = None
        self.body = to_json(content, inf_nan_mode="null")  # bytes at once, sooner than `json` has text
        self.raw_headers = [(b"content-length", b"%d" % len(self.body)), _TYPE]
