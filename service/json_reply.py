"""Replies of JSON."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_TYPE = (b"content-type", b"application/json")
# As JSONResponse's; `json.dumps` would make an encoder for each reply.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class JsonReply(Response):
    """A JSONResponse of status 200 whose head is not put together from a mapping of headers."""

    def __init__(self, content: Mapping[str, Any] | list[Any]) -> None:
        # Not the base class's: all that it would do is here.
        self.status_code = 200
        self.background = None
        self.body = _encode(content).encode()
        self.raw_headers = [(b"content-length", b"%d" % len(self.body)), _TYPE]
