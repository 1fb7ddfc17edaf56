"""Keys: equal factors give equal keys, and any difference another one that can be named."""

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest

from snapcap.warmup.artifacts.fetch import nearest
from snapcap.warmup.artifacts.key import ABSENT, Difference, FactorError, artifact_key, differing

FACTORS: dict[str, Any] = {
    "torch.version": "2.13.0",
    "buckets": [1, 4],
    "compile.tune": True,
    "rate": 0.5,
    "triton": None,
}


@dataclass(frozen=True)
class Candidate:
    factors: dict[str, Any]


def test_key_is_the_hash_of_canonical_json() -> None:
    text = '{"buckets":[1,4],"compile.tune":true,"rate":0.5,"torch.version":"2.13.0","triton":null}'
    assert artifact_key(FACTORS) == hashlib.sha256(text.encode()).hexdigest()
    assert artifact_key(dict(reversed([*FACTORS.items()]))) == artifact_key(FACTORS)


@pytest.mark.parametrize(
    ("name", "value"),
    [("torch.version", "2.13.1"), ("buckets", [4, 1]), ("compile.tune", 1), ("rate", 0.25), ("triton", "")],
)
def test_any_other_value_is_another_key(name: str, value: Any) -> None:
    changed = FACTORS | {name: value}
    assert artifact_key(changed) != artifact_key(FACTORS)
    assert differing(FACTORS, changed) == [Difference(name, FACTORS[name], value)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", float("nan")),
        ("rate", float("inf")),
        ("options", {"a": 1}),
        ("options", [1, {"a": 1}]),
        ("options", (1, 2)),
        ("text", "line\nbreak"),
        ("text", "\ud800"),
        ("Capital", 1),
        ("", 1),
        ("a..b", 1),
    ],
)
def test_what_is_no_factor_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(FactorError, match=name or "''"):
        artifact_key({name: value})


def test_differences_read_as_sentences() -> None:
    ours: dict[str, Any] = {"a": "x", "b": 1}
    theirs: dict[str, Any] = {"a": "x", "c": [1]}
    assert differing(ours, theirs) == [Difference("b", 1, ABSENT), Difference("c", ABSENT, [1])]
    assert [str(item) for item in differing(ours, theirs)] == [
        "b is 1 here and (absent) there",
        "c is (absent) here and [1] there",
    ]
    assert len(str(Difference("a", "x" * 500, "y"))) < 140


def test_nearest_has_the_fewest_differences() -> None:
    far = Candidate(FACTORS | {"rate": 1.5, "buckets": [1]})
    near = Candidate(FACTORS | {"rate": 2.5})
    also_near = Candidate(FACTORS | {"rate": 3.5})
    assert nearest(FACTORS, [far, near, also_near]) == (near, [Difference("rate", 0.5, 2.5)])
    assert nearest(FACTORS, []) is None
