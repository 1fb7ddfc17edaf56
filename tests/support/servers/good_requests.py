"""Builds a good request in JSON for each API that captions."""

import base64
from typing import Any

PATHS = {
    "caption": "/v1/caption",
    "huggingface": "/models/fake",
    "openai": "/v1/chat/completions",
    "v2": "/v2/models/fake/infer",
}
APIS = tuple(PATHS)


def good_request(api: str, image: bytes) -> dict[str, Any]:
    """The document of a request that is good."""
    text = base64.b64encode(image).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    return {
        "caption": {"image": text},
        "huggingface": {"inputs": text},
        "openai": {"model": "fake", "messages": [{"role": "user", "content": parts}]},
        "v2": {"inputs": [tensor]},
    }[api]


def options_of(api: str, document: dict[str, Any]) -> dict[str, Any]:
    """The object of a document in which the API has its options."""
    options: dict[str, Any] = document if api in ("caption", "openai") else document.setdefault("parameters", {})
    return options
