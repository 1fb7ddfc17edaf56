"""Manifests: what is accepted is exactly what was sealed, by somebody trusted."""

import base64
import json
import time
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.key import artifact_key, canonical_json
from snapcap.warmup.artifacts.manifest import (
    MAX_ENVELOPE_BYTES,
    PAYLOAD_TYPE,
    Blob,
    Manifest,
    ManifestError,
    UntrustedError,
    open_envelope,
    seal,
    seal_payload,
)
from snapcap.warmup.artifacts.signing import OWNER, Signer, Trust, generate_key, load_signer

FACTORS: dict[str, Any] = {"torch.version": "2.13.0", "model.buckets": [1, 4]}
MANIFEST = Manifest(
    key=artifact_key(FACTORS),
    factors=FACTORS,
    kind="aot",
    entries={"blocks.pt2": Blob("a" * 64, 10), "more/blocks_2.pt2": Blob("b" * 64, 0)},
    created="2026-01-02T03:04:05+00:00",
    builder="0.1.0",
    metadata={"inputs": [[1, 3], "float32"]},
)


def test_round_trip(signer: Signer, trust: Trust) -> None:
    assert open_envelope(seal(MANIFEST, signer), trust) == MANIFEST
    assert open_envelope(seal(MANIFEST, None), OWNER) == MANIFEST
    assert MANIFEST.total_bytes == 10


def test_the_signature_is_that_of_dsse(signer: Signer, trust: Trust) -> None:
    sealed = json.loads(seal(MANIFEST, signer))
    payload = base64.b64decode(sealed["payload"])
    expected = f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload
    signature = base64.b64decode(sealed["signatures"][0]["sig"])
    assert signature == signer.sign(expected).value
    assert json.loads(payload) == asdict(MANIFEST)


def test_unsigned_and_strangers_are_untrusted(tmp_path: Path, trust: Trust) -> None:
    generate_key(tmp_path / "stranger")
    stranger = load_signer(tmp_path / "stranger")
    with pytest.raises(UntrustedError, match="not signed"):
        open_envelope(seal(MANIFEST, None), trust)
    with pytest.raises(UntrustedError, match=stranger.key_id):
        open_envelope(seal(MANIFEST, stranger), trust)
    with pytest.raises(UntrustedError):
        open_envelope(seal(MANIFEST, None), Trust())


def test_a_stranger_under_a_trusted_name_is_refused(tmp_path: Path, signer: Signer, trust: Trust) -> None:
    generate_key(tmp_path / "stranger")
    impostor = replace(load_signer(tmp_path / "stranger"), key_id=signer.key_id)
    with pytest.raises(ManifestError, match="not that of its content"):
        open_envelope(seal(MANIFEST, impostor), trust)


def test_nothing_is_parsed_before_it_is_verified(
    signer: Signer, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def loads(data: str, **options: Any) -> Any:
        parsed.append(data)
        return real(data, **options)

    real = json.loads
    monkeypatch.setattr(json, "loads", loads)
    unsigned = seal_payload(b'{"format": 1}', None)
    with pytest.raises(UntrustedError):
        open_envelope(unsigned, trust)
    assert parsed == [unsigned.decode()]


@pytest.mark.parametrize("signed", [True, False])
def test_every_flipped_bit_is_seen(signed: bool, signer: Signer, trust: Trust) -> None:
    sealed = seal(MANIFEST, signer if signed else None)
    name = sealed.find(signer.key_id.encode()) if signed else len(sealed)
    for position in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[position] ^= 1 << position % 8
        flipped = damaged[position]
        if name <= position < name + len(signer.key_id) and 32 <= flipped < 127 and flipped not in b'"\\':
            assert open_envelope(bytes(damaged), trust) == MANIFEST  # the name of a key that did sign
        else:
            with pytest.raises(ManifestError):
                open_envelope(bytes(damaged), trust if signed else OWNER)


def test_base64_has_one_spelling(signer: Signer, trust: Trust) -> None:
    """The last letter of 64 bytes holds two bits of them and four of nothing."""
    sealed = json.loads(seal(MANIFEST, signer))
    text = sealed["signatures"][0]["sig"]
    respelled = text[:-3] + chr(ord(text[-3]) + 1) + "=="
    assert base64.b64decode(respelled) == base64.b64decode(text)
    sealed["signatures"][0]["sig"] = respelled
    with pytest.raises(ManifestError, match="canonical"):
        open_envelope(canonical_json(sealed), trust)


def test_every_truncation_is_seen(signer: Signer, trust: Trust) -> None:
    sealed = seal(MANIFEST, signer)
    for length in range(len(sealed)):
        with pytest.raises(ManifestError):
            open_envelope(sealed[:length], trust)


def changed(**fields: Any) -> bytes:
    """A well-signed envelope around bad content: the parser alone must refuse it."""
    content: dict[str, Any] = asdict(MANIFEST) | fields
    return seal_payload(canonical_json({name: item for name, item in content.items() if item is not ...}), None)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../b",
        "..",
        ".",
        "/etc/x",
        "a//b",
        "a/",
        "",
        ".a",
        "a/.b",
        "A",
        "a b",
        "a\n",
        "a\\b",
        "é",
        "x" * 201,
    ],
)
def test_unsafe_names_are_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="not a safe name"):
        open_envelope(changed(entries={name: {"digest": "a" * 64, "size": 1}}), OWNER)


@pytest.mark.parametrize(
    "blob",
    [
        None,
        {},
        {"digest": "a" * 63, "size": 1},
        {"digest": "A" * 64, "size": 1},
        {"digest": "../" + "a" * 61, "size": 1},
        {"digest": "a" * 64, "size": -1},
        {"digest": "a" * 64, "size": 1.0},
        {"digest": "a" * 64, "size": True},
        {"digest": "a" * 64, "size": 1 << 50},
        {"digest": "a" * 64, "size": 1, "url": "x"},
    ],
)
def test_bad_blobs_are_refused(blob: Any) -> None:
    with pytest.raises(ManifestError, match="digest and size"):
        open_envelope(changed(entries={"x": blob}), OWNER)


@pytest.mark.parametrize(
    "fields",
    [
        {"format": 2},
        {"format": True},
        {"format": ...},
        {"kind": "exe"},
        {"kind": ...},
        {"extra": 1},
        {"key": "0" * 64},
        {"key": 7},
        {"factors": {"torch.version": "2.11.0"}},
        {"factors": {"Bad": 1}},
        {"factors": []},
        {"entries": {}},
        {"entries": []},
        {"entries": {f"f{index}": {"digest": "a" * 64, "size": 1} for index in range(5000)}},
        {"entries": {f"f{index}": {"digest": f"{index:064x}", "size": 1 << 34} for index in range(3)}},
        {"created": "yesterday"},
        {"created": "2026-01-02T03:04:05"},
        {"created": "2026-01-02T03:04:05+02:00"},
        {"builder": ""},
        {"metadata": []},
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        open_envelope(changed(**fields), OWNER)


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"payload": 1}', b"x" * (5 << 20)]
)
def test_what_is_no_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        open_envelope(data, OWNER)


def test_a_bad_manifest_is_not_sealed() -> None:
    with pytest.raises(ManifestError, match="safe name"):
        seal(replace(MANIFEST, entries={"../x": Blob("a" * 64, 1)}), None)
    with pytest.raises(ManifestError, match="metadata"):
        seal(replace(MANIFEST, metadata={"x": Path("p")}), None)


def spelled(**fields: bytes) -> bytes:
    """A well-signed envelope around a content in which these fields are written just so."""
    content = asdict(MANIFEST)
    members = [
        canonical_json(name) + b":" + fields.get(name, canonical_json(item)) for name, item in content.items()
    ]
    return seal_payload(b"{" + b",".join(members) + b"}", None)


def test_it_is_the_spelling_that_is_refused() -> None:
    assert open_envelope(spelled(), OWNER) == MANIFEST


BLOB = b'{"digest":"%s","size":1}' % (b"a" * 64)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"metadata": b'{"x":1,"x":2}'}, "not JSON"),
        ({"entries": b'{"x":%s,"x":%s}' % (BLOB, BLOB)}, "not JSON"),
        ({"entries": b'{"x":{"digest":"%s","size":1,"size":2}}' % (b"a" * 64)}, "not JSON"),
        ({"metadata": b'{"x":NaN}'}, "not JSON"),
        ({"metadata": b'{"x":-Infinity}'}, "not JSON"),
        ({"metadata": b'{"x":' + b"9" * 5000 + b"}"}, "not JSON"),
        ({"metadata": b'{"x":"' + b"\xed\xa0\x80" + b'"}'}, "not JSON"),
        ({"metadata": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"}, "JSON|deep"),
        ({"factors": b'{"x":' + b"[" * 300 + b"]" * 300 + b"}"}, "8 lists in each other"),
        ({"factors": b'{"%s":1}' % (b"x" * 101)}, "factor name"),
        ({"factors": b"{%s}" % b",".join(b'"f%d":1' % index for index in range(300))}, "300 factors"),
        ({"factors": b'{"x":"a\\nb"}'}, "printable"),
        ({"builder": b'"1\\n[ERROR] all is lost"'}, "builder"),
        ({"entries": b'{"x\\u0000":%s}' % BLOB}, "safe name"),
        ({"entries": b'{"\\u2024\\u2024/x":%s}' % BLOB}, "safe name"),
        ({"entries": b'{"\\uff0e\\uff0e/x":%s}' % BLOB}, "safe name"),
        ({"entries": b'{"x":{"digest":"%s","size":1e3}}' % (b"a" * 64)}, "digest and size"),
        ({"entries": b'{"x":{"digest":"%s","size":%s}}' % (b"a" * 64, b"9" * 4000)}, "digest and size"),
        ({"entries": b'{"x":{"digest":"%s","size":1}}' % (b"\xd9\xa3" * 64)}, "digest and size"),
        ({"format": b"[" * 300 + b"]" * 300}, "format"),
    ],
)
def test_what_two_readers_could_read_in_two_ways_is_refused_in_a_line(fields: dict[str, bytes], said: str) -> None:
    with pytest.raises(ManifestError, match=said) as raised:
        open_envelope(spelled(**fields), OWNER)
    assert len(str(raised.value)) < 400
    assert str(raised.value).isprintable()


def test_an_envelope_s_names_occur_once(signer: Signer, trust: Trust) -> None:
    """Or the signature could be over one payload, and another be shown to whoever reads the first."""
    sealed, other = seal(MANIFEST, signer), seal(replace(MANIFEST, created="2030-01-01T00:00:00+00:00"), None)
    payload = b'"payload":' + canonical_json(json.loads(other)["payload"])
    with pytest.raises(ManifestError, match="not JSON"):
        open_envelope(b"{" + payload + b"," + sealed[1:], trust)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 5000])
def test_signatures_of_another_length_are_none(size: int, signer: Signer, trust: Trust) -> None:
    sealed = json.loads(seal(MANIFEST, signer))
    sealed["signatures"][0]["sig"] = base64.b64encode(bytes(size)).decode()
    with pytest.raises(ManifestError, match="not that of its content"):
        open_envelope(canonical_json(sealed), trust)


def test_a_signature_is_over_the_type_and_the_whole_payload(signer: Signer, trust: Trust) -> None:
    payload = base64.b64decode(json.loads(seal(MANIFEST, signer))["payload"])
    for message in (payload, b"DSSEv1 4 text %d %b" % (len(payload), payload), payload[:-1]):
        sealed = json.loads(seal(MANIFEST, signer))
        sealed["signatures"][0]["sig"] = base64.b64encode(signer.sign(message).value).decode()
        with pytest.raises(ManifestError, match="not that of its content"):
            open_envelope(canonical_json(sealed), trust)


@pytest.mark.parametrize("piece", [b"[],", b'{"a":0},', b'"\\u00e9",'])
def test_the_largest_envelope_takes_bounded_time_and_memory(piece: bytes) -> None:
    """Of a stranger: it is parsed before its signature can be found."""
    data = b'{"signatures":[' + piece * (MAX_ENVELOPE_BYTES // len(piece) - 10) + b"0]}"
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(ManifestError):
        open_envelope(data, OWNER)
    seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * MAX_ENVELOPE_BYTES
    assert seconds < 30
