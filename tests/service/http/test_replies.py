"""What a reply says, beside starlette's."""

import json
import math
from typing import Any

import pytest
from starlette.responses import JSONResponse

from snapcap.service.http.replies import JsonReply

CONTENTS: list[Any] = [
    {"caption": 'a "quoted" \\ caption\n', "tokens": 9, "timings": {"total": 12.345, "queue": 0.0, "small": 1e-07}},
    {"captions": [{"caption": "naïve 日本 🙂 \u2028 \x00\x1f\x7f</script>"}, {}, []], "usage": None, "live": True},
    [{"generated_text": ""}],
    {"shape": (1, 2), "large": 1e22, "id": 2**53},
]


@pytest.mark.parametrize("content", CONTENTS)
def test_a_reply_says_what_starlettes_does(content: Any) -> None:
    ours, theirs = JsonReply(content), JSONResponse(content)
    assert json.loads(ours.body) == json.loads(theirs.body)
    assert ours.status_code == theirs.status_code
    assert dict(ours.headers) == dict(theirs.headers) | {"content-length": str(len(ours.body))}


def test_a_number_that_json_does_not_know_is_null() -> None:
    assert json.loads(JsonReply({"nan": math.nan, "inf": -math.inf}).body) == {"nan": None, "inf": None}
