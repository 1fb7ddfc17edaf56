"""Manifests of models: each is opened, or refused with a declared error; none that was changed opens as another."""

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.attacks.fuzzing import fuzzed
from support.attacks.mutations import mutated

from snapcap.warmup.artifacts.key import artifact_key, canonical_json
from snapcap.warmup.artifacts.manifest import (
    PAYLOAD_TYPE,
    Blob,
    Manifest,
    ManifestError,
    Weights,
    new_manifest,
    open_envelope,
    seal,
)
from snapcap.warmup.artifacts.signing import OWNER, Trust

FACTORS = {"kind": "model", "model.source": "s3://bucket/x", "device.type": "cpu"}
KEY = artifact_key(FACTORS)
WEIGHTS = Weights(
    Blob("01" * 32, 20 << 20),
    ("23" * 32, "45" * 32),
    "ab" * 32,
    {"config.json": '"1" 2', "model.safetensors": '"0123" 4'},
)
ENTRIES = {"config.json": Blob("cd" * 32, 7), "tokenizer.json": Blob("ef" * 32, 70_000)}
SEED = seal(new_manifest("model", FACTORS, ENTRIES, weights=WEIGHTS), None)
PAYLOAD = base64.b64decode(json.loads(SEED)["payload"])
MARKS = (b"null", b"true", b"[]", b"{}", b"1e999", b"..", b"/", b"\\u0000", b"-1", b'"format":1')
STRICT = Trust(keys=(), allow_unsigned=False)


def opened(data: bytes, trust: Trust = OWNER) -> Manifest | None:
    """None where it is refused."""
    try:
        manifest = open_envelope(data, trust, KEY)
    except ManifestError as error:
        sentence = str(error)
    else:
        check(manifest)
        return manifest
    assert len(sentence) < 1_000, "a line of the log that grows with the manifest"
    return None


def check(manifest: Manifest) -> None:
    """No name leaves a folder, and no size is beyond what is sensible."""
    assert all("/" not in name and not name.startswith(".") for name in manifest.entries)
    assert 0 < manifest.model_weights.size <= 32 << 30
    assert len(manifest.model_weights.chunks) == -(-manifest.model_weights.size // (16 << 20))


def enveloped(payload: bytes) -> bytes:
    """An unsigned envelope whose checksum fits, so that the payload is parsed."""
    fields = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "payloadDigest": hashlib.sha256(payload).hexdigest(),
        "signatures": [],
    }
    return json.dumps(fields).encode()


def test_the_seed_is_opened() -> None:
    assert opened(SEED) is not None
    assert opened(SEED, STRICT) is None


@fuzzed(300)
@given(mutated([SEED], MARKS))
def test_envelopes(data: bytes) -> None:
    assert opened(data) in (None, opened(SEED))
    assert opened(data, STRICT) is None


@fuzzed(500)
@given(mutated([PAYLOAD], MARKS))
def test_payloads(payload: bytes) -> None:
    opened(enveloped(payload))


def values() -> st.SearchStrategy[Any]:
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    )


@fuzzed(400)
@given(st.sampled_from(sorted(json.loads(PAYLOAD))), values(), values())
def test_any_value_of_any_field(field: str, value: Any, inner: Any) -> None:
    document = json.loads(PAYLOAD)
    opened(enveloped(json.dumps({**document, field: value}).encode()))
    if isinstance(document[field], dict) and document[field]:
        first = next(iter(document[field]))
        changed = {**document[field], first: value, str(inner)[:50]: inner}
        opened(enveloped(json.dumps({**document, field: changed}).encode()))


@pytest.mark.parametrize("field", ["factors", "entries", "weights.identity", "weights.chunks", "weights", "format"])
def test_as_deep_as_the_parser_reads(field: str) -> None:
    document = json.loads(PAYLOAD)
    outer, _, inner = field.partition(".")
    (document[outer] if inner else document)[inner or outer] = "nested"
    for depth in (100, 500, 900, *range(950, 1_000), 5_000):
        payload = json.dumps(document).replace('"nested"', "[" * depth + "]" * depth)
        opened(enveloped(payload.encode()))


def test_the_seed_has_one_spelling() -> None:
    assert canonical_json(json.loads(PAYLOAD)) == PAYLOAD
