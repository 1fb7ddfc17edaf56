"""JSON bodies of every API: each is read, or refused with an error of the client that can be written as a reply."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.attacks.fuzz_requests import AtOnce, read, request_of
from support.attacks.fuzzing import corpus, fuzzed
from support.attacks.mutations import mutated

from snapcap.service.api.answers import LABELS
from snapcap.service.api.caption import read_image
from snapcap.service.api.conversation import TextUse
from snapcap.service.api.huggingface import parse_inputs
from snapcap.service.api.ollama import CHAT, GENERATE, read_ollama, sort_ollama, sort_show
from snapcap.service.api.ollama import FIELDS as OLLAMA
from snapcap.service.api.openai import OPTIONS, read_chat, sort_chat
from snapcap.service.api.responses import FIELDS as RESPONSES
from snapcap.service.api.responses import read_response, sort_response
from snapcap.service.api.v2 import parse_infer
from snapcap.service.captioning.options import NAMES, NEUTRAL, CaptionOptions
from snapcap.service.http.bodies import BodyLimits

LIMITS = BodyLimits(1 << 20, 5.0, pool=AtOnce())
SEEDS = corpus("json")
MARKS = (
    *(
        b"null",
        b"true",
        b"{}",
        b"[]",
        b'""',
        b"1e999",
        b"-0",
        b"NaN",
        b"\\ud800",
        b"\\u0000",
        b"[[",
        b'{"a":',
        b"\xff",
    ),
    *(f'"{name}": '.encode() for name in ("image", "inputs", "parameters", "messages", *NAMES)),
)


def caption(body: bytes) -> tuple[bytes, CaptionOptions]:
    return asyncio.run(read_image(request_of(body, "application/json"), LIMITS))


PARSERS: dict[str, Callable[[bytes], Any]] = {
    "caption": caption,
    "huggingface": parse_inputs,
    "ollama": lambda body: read_ollama(GENERATE, sort_ollama(GENERATE, body), TextUse.IGNORE),
    "ollama_chat": lambda body: read_ollama(CHAT, sort_ollama(CHAT, body), TextUse.IGNORE),
    "ollama_show": sort_show,
    "openai": lambda body: read_chat(sort_chat(body), TextUse.IGNORE),
    "openai_conversing": lambda body: read_chat(sort_chat(body), TextUse.CONVERSE),
    "openai_continued": lambda body: read_chat(sort_chat(body), TextUse.CONTINUE),
    "responses": lambda body: read_response(sort_response(body), TextUse.IGNORE),
    "responses_conversing": lambda body: read_response(sort_response(body), TextUse.CONVERSE),
    "responses_instructed": lambda body: read_response(sort_response(body), TextUse.INSTRUCT),
    "v2": lambda body: parse_infer(body, None),
}


@pytest.mark.parametrize("name", PARSERS)
def test_corpus(name: str) -> None:
    """Some file of the corpus is read by each: behind a refusal at the door nothing would be found."""
    assert any(read(lambda body=body: PARSERS[name](body)) for body in SEEDS)


@pytest.mark.parametrize("name", PARSERS)
@fuzzed(300)
@given(body=mutated(SEEDS, MARKS))
def test_mutated(name: str, body: bytes) -> None:
    read(lambda: PARSERS[name](body))


@fuzzed(300)
@given(mutated(SEEDS, MARKS), st.one_of(st.text(max_size=20), st.integers().map(str)))
def test_lengths_of_headers(body: bytes, length: str) -> None:
    """v2's binary data behind the JSON, whose length is the client's to say."""
    read(lambda: parse_infer(body, length))


def values() -> st.SearchStrategy[Any]:
    # Surrogates too, which JSON can spell.
    text = st.one_of(st.text(max_size=20), st.text(st.characters(), max_size=4), st.just("\ud800"))
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text, st.just(10**400))
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4)
    )


GOOD = [json.loads(seed) for seed in corpus("json")]
FIELDS = sorted(
    {*NAMES, *OPTIONS, *NEUTRAL, *LABELS, *OLLAMA, *RESPONSES, "image", "inputs", "outputs", "parameters", "id"}
)


@pytest.mark.parametrize("name", PARSERS)
@fuzzed(150)
@given(
    document=st.sampled_from(GOOD),
    changes=st.lists(st.tuples(st.sampled_from(FIELDS), st.booleans(), values()), min_size=1, max_size=3),
)
def test_any_value_of_any_field(name: str, document: dict[str, Any], changes: list[tuple[str, bool, Any]]) -> None:
    """In a good document, at the top or within its parameters."""
    changed = dict(document)
    for field, within, value in changes:
        parameters = changed.get("parameters", {})
        if within and isinstance(parameters, dict):
            changed["parameters"] = {**parameters, field: value}
        else:
            changed[field] = value
    read(lambda: PARSERS[name](json.dumps(changed).encode()))


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "field",
    [
        *("image", "inputs", "id", "model", "stop", "messages", "seed", "logit_bias", "outputs"),
        *("input", "text", "images", "format", "options", "response_format"),
    ],
)
def test_as_deep_as_the_parser_reads(name: str, field: str) -> None:
    """Whoever comes after it, and whoever writes the error, must bear the same depth."""
    for depth in (*range(100, 1_000, 45), *range(950, 1_000), 5_000):
        body = b'{"model": "demo", "%s": %s}' % (field.encode(), b"[" * depth + b"]" * depth)
        read(lambda body=body: PARSERS[name](body))
