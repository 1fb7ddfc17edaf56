"""Makes an artifact key of named factors: two machines with equal factors share one set of artifacts."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

from snapcap.models.dataclass import dataclass

Factor = str | int | float | bool | None | list["Factor"]
Factors = Mapping[str, Factor]

ABSENT = "(absent)"
MAX_FACTORS = 256
MAX_DEPTH = 8  # levels of lists in lists
_MAX_NAME = 100
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_-]+)*")


class FactorError(ValueError):
    """Says in one line which factor cannot be part of a key."""


class HasFactors(Protocol):
    """Anything that was built from factors, such as a manifest."""

    @property
    def factors(self) -> Factors: ...


Built = TypeVar("Built", bound=HasFactors)


@dataclass(frozen=True)
class Difference:
    """Describes a factor whose values differ; a factor that only one side has is ``ABSENT`` on the other."""

    name: str
    ours: Factor
    theirs: Factor

    def __str__(self) -> str:
        return f"{self.name} is {_shown(self.ours)} here and {_shown(self.theirs)} there"


def artifact_key(factors: Factors) -> str:
    """Returns the SHA-256, in hex, of the factors as canonical JSON.

    Raises:
        FactorError: a name is not dotted lower case, or a value is not JSON (NaN and objects are not).
    """
    return hashlib.sha256(canonical_json(check_factors(factors))).hexdigest()


def canonical_json(value: object) -> bytes:
    """Returns the one spelling of a JSON value: sorted keys, no spaces, UTF-8.

    Raises:
        ValueError, TypeError: the value is not JSON.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def check_factors(factors: Mapping[str, object]) -> dict[str, Factor]:
    """Returns the same factors, of which each has a right type and all together are not too many.

    Raises:
        FactorError: as for ``artifact_key``.
    """
    if len(factors) > MAX_FACTORS:
        raise FactorError(f"there are {len(factors)} factors, more than {MAX_FACTORS}")
    return {_checked_name(name): _checked(name, value) for name, value in factors.items()}


def differing(ours: Factors, theirs: Factors) -> list[Difference]:
    """Returns the factors that give the two sides different keys, by name. 1, 1.0 and true are three values."""
    return [
        Difference(name, ours.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in sorted({*ours, *theirs})
        if _spelled(ours, name) != _spelled(theirs, name)
    ]


def nearest(factors: Factors, candidates: Iterable[Built]) -> tuple[Built, list[Difference]] | None:
    """Returns the candidate with the fewest differing factors, the first of equals; None without candidates."""
    compared = [(candidate, differing(factors, candidate.factors)) for candidate in candidates]
    return min(compared, key=lambda pair: len(pair[1]), default=None)


def _spelled(factors: Factors, name: str) -> bytes | None:
    return canonical_json(factors[name]) if name in factors else None


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise FactorError(
            f"factor name {str(name)[:_MAX_NAME]!r}: write lower-case words joined by dots, such as model.dtype"
        )
    return name


def _checked(name: str, value: object, depth: int = 0) -> Factor:
    if isinstance(value, list):
        if depth == MAX_DEPTH:
            raise FactorError(f"factor {name} has over {MAX_DEPTH} lists in each other")
        return [_checked(name, item, depth + 1) for item in value]
    if isinstance(value, float) and value - value != 0:  # NaN and infinities are not JSON
        raise FactorError(f"factor {name} is {value}: only finite numbers can be part of a key")
    if isinstance(value, str) and not value.isprintable():  # also half a surrogate pair, which UTF-8 cannot say
        raise FactorError(f"factor {name} is {value[:80]!r}: only printable text can be part of a key")
    if value is None or isinstance(value, str | int | float):
        return value
    raise FactorError(f"factor {name} is a {type(value).__name__}: use text, numbers, booleans, null and lists")


def _shown(value: Factor) -> str:
    if value == ABSENT:
        return ABSENT
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def describe_model(factors: Factors) -> str:
    """Returns one line: ``blip: blip 384×384, 12 layers of 768 → blip, 12 layers of 768, 30524 tokens; float32``.

    A question mark stands for a factor that is missing, as in a manifest of another version.
    """

    def of(name: str) -> Any:
        return factors.get(f"model.{name}", "?")

    def layers(part: str) -> str:
        return f"{of(f'{part}.num_layers')} layers of {of(f'{part}.hidden_size')}"

    image = of("vision.image_size")
    size = "×".join(str(side) for side in image) if isinstance(image, list) else str(image)
    return (
        f"{of('family')}: {of('vision.family')} {size}, {layers('vision')} → "
        f"{of('decoder.family')}, {layers('decoder')}, {of('decoder.vocab_size')} tokens; {of('dtype')}"
    )
