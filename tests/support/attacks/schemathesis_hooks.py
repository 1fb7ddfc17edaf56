"""Hooks into schemathesis: real images where the document says image, and a check in place of a stricter one."""

import base64
from pathlib import Path

import schemathesis
from hypothesis import strategies as st

from snapcap.models.processing.image_formats import MEDIA_TYPES

_SAMPLES = Path(__file__).parents[3] / "models" / "demo" / "samples"
_IMAGE = st.sampled_from([path.read_bytes() for path in sorted(_SAMPLES.glob("*.png"))])
_BASE64 = _IMAGE.map(lambda image: base64.b64encode(image).decode())

schemathesis.openapi.format("byte", _BASE64)
schemathesis.openapi.format("data-uri", _BASE64.map(lambda text: f"data:image/png;base64,{text}"))
for _media_type in (*MEDIA_TYPES, "application/octet-stream"):
    schemathesis.openapi.media_type(_media_type, _IMAGE)


@schemathesis.hook
def filter_query(_context: schemathesis.HookContext, query: dict[str, object] | None) -> bool:
    """A query ends at 8 KiB, which is 414 whatever it says; a character may take twelve of its bytes."""
    return len(str(query or {})) < 600


# Why a request that fits the document may be refused: the image is none, the model does not hold so much, or one
# member does not go with another.
_BEYOND_SCHEMAS = (
    "the model can hold no more after the prompt",
    "tokens; send at most",
    "not an image",
    "images are not read",
    "have as many elements as there are images",
    "be given once",
    "a beam search does not sample",
    "a beam search has no token before its end",
    "the rows of this server's largest bucket",
    "printable characters",
    "valid Unicode text",
    "this model has one task alone",
    "a caption cannot be constrained to a schema",
    "Inference-Header-Content-Length",
    "not JSON",  # binary tensor data without the header that says where it begins
    "to 18446744073709551615",  # a float cannot be compared with it
)


@schemathesis.check
def refused_only_for_what_no_schema_can_say(
    _ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code not in (400, 422):
        return
    text = response.text
    assert any(reason in text for reason in _BEYOND_SCHEMAS), (
        f"a request that fits the document was refused: {text}"
    )
