"""Builds a good request in JSON for each API that captions."""

import base64
from typing import Any

PATHS = {
    "caption": "/v1/caption",
    "huggingface": "/models/fake",
    "ollama": "/api/generate",
    "openai": "/v1/chat/completions",
    "responses": "/v1/responses",
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
        "ollama": {"model": "fake", "images": [text], "stream": False},
        "openai": {"model": "fake", "messages": [{"role": "user", "content": parts}]},
        "responses": {"model": "fake", "input": [{"role": "user", "content": parts}]},
        "v2": {"inputs": [tensor]},
    }[api]


def options_of(api: str, document: dict[str, Any]) -> dict[str, Any]:
    """The object of a document in which the API has its options."""
    if api in ("caption", "openai", "responses"):
        return document
    options: dict[str, Any] = document.setdefault("options" if api == "ollama" else "parameters", {})
    return options
