"""Envelopes and manifests: each is opened, or refused with a declared error; none that was changed opens."""

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.attacks.fuzzing import corpus, fuzzed
from support.attacks.mutations import mutated

from snapcap.warmup.artifacts.manifest import PAYLOAD_TYPE, Manifest, ManifestError, open_envelope
from snapcap.warmup.artifacts.signing import OWNER, Trust

SEEDS = corpus("manifests")
MARKS = (
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"1e999",
    b"NaN",
    b"..",
    b"/",
    b"\\u0000",
    b"\\ud800",
    b"-1",
    b'"format":1',
)
STRICT = Trust(keys=(), allow_unsigned=False)


def opened(data: bytes, trust: Trust = OWNER) -> Manifest | None:
    """None where it is refused."""
    try:
        return open_envelope(data, trust)
    except ManifestError as error:
        sentence = str(error)
    assert len(sentence) < 1_000, "a line of the log that grows with the manifest"
    return None


def enveloped(payload: bytes) -> bytes:
    """An unsigned envelope whose checksum fits, so that the payload is parsed."""
    fields = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "payloadDigest": hashlib.sha256(payload).hexdigest(),
        "signatures": [],
    }
    return json.dumps(fields).encode()


PAYLOADS = [base64.b64decode(json.loads(seed)["payload"]) for seed in SEEDS]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_seeds_are_opened(seed: bytes) -> None:
    assert opened(seed) is not None
    assert opened(seed, STRICT) is None


@fuzzed(700)
@given(mutated(SEEDS, MARKS))
def test_envelopes(data: bytes) -> None:
    """What opens holds what the seed held: other spelling, or nothing at all."""
    assert opened(data) in (None, *(opened(seed) for seed in SEEDS))
    assert opened(data, STRICT) is None


@fuzzed(1_000)
@given(mutated(PAYLOADS, MARKS))
def test_payloads(payload: bytes) -> None:
    opened(enveloped(payload))


def values() -> st.SearchStrategy[Any]:
    text = st.one_of(st.text(max_size=20), st.text(st.characters(), max_size=4))
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4)
    )


@fuzzed(700)
@given(
    st.sampled_from(PAYLOADS),
    st.sampled_from(("key", "factors", "kind", "entries", "created", "builder", "metadata", "format")),
    values(),
    values(),
)
def test_any_value_of_any_field(payload: bytes, field: str, value: Any, inner: Any) -> None:
    """In place of the field, and within it where it is an object."""
    document = json.loads(payload)
    opened(enveloped(json.dumps({**document, field: value}).encode()))
    if isinstance(document[field], dict) and document[field]:
        first = next(iter(document[field]))
        changed = {**document[field], first: value, str(inner)[:50]: inner}
        opened(enveloped(json.dumps({**document, field: changed}).encode()))


@pytest.mark.parametrize("field", ["factors", "entries", "metadata", "format", "key", "signatures"])
def test_as_deep_as_the_parser_reads(field: str) -> None:
    document = json.loads(PAYLOADS[0])
    for depth in (*range(100, 1_000, 45), *range(950, 1_000), 5_000):
        nested = "[" * depth + "]" * depth
        rest = {name: value for name, value in document.items() if name != field}
        opened(enveloped(f'{json.dumps(rest)[:-1]}, "{field}": {nested}}}'.encode()))
        opened(f'{{"payload": {nested}, "payloadType": "", "payloadDigest": "", "signatures": []}}'.encode())
