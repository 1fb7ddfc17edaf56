"""Parses the options of a caption by one table, from which the OpenAPI document describes them too.

An option arrives as text (query parameter, form field) or as a JSON value. Text is read as the type of the
option; a JSON value must have that type already.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS
from snapcap.models.text import EarlyStopping
from snapcap.service.errors import InvalidOption, PromptTooLong, UnknownOption
from snapcap.warmup.runtime.slot_request import SamplingParams

MAX_PROMPT_CHARACTERS = 10_000
MAX_TASK_CHARACTERS = 64
_DEFAULT = SamplingParams()


@dataclass(frozen=True)
class CaptionOptions:
    """What a request asks for. None: the server's default. `timeout` in seconds can only shorten the server's.

    `clamp`: `max_new_tokens` may be more than the model holds, and then means as many as it holds. Clients of other
    APIs send such bounds whatever the model is. `named`: the options that were given, for which no default of a
    model holds. `ignored`: the fields of the request that nobody reads, which the reply names."""

    prompt: str = ""
    sampling: SamplingParams = _DEFAULT
    timeout: float | None = None
    clamp: bool = False
    task: str = ""
    named: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()

    def ignoring(self, *names: str) -> "CaptionOptions":
        """The same options beside further fields that nobody reads."""
        return replace(self, ignored=(*self.ignored, *names)) if names else self


@dataclass(frozen=True)
class _Range:
    """A number from `low` to `high`; `above` excludes `low`."""

    kind: type[int] | type[float]
    low: float
    high: float
    above: bool = False

    def sentence(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        start = f"above {self.low:g} and at most" if self.above else f"from {self.low:g} to"
        return f"be {noun} {start} {self.high if self.kind is int else format(self.high, 'g')}"

    def holds(self, number: float) -> bool:
        return self.low <= number <= self.high and not (self.above and number == self.low)


_RANGES: dict[str, _Range] = {
    "max_new_tokens": _Range(int, 1, 65536),
    "min_new_tokens": _Range(int, 0, 65536),
    "min_length": _Range(int, 0, 65536),
    "temperature": _Range(float, 0, 2),
    "top_k": _Range(int, 0, 2**31 - 1),
    "top_p": _Range(float, 0, 1, above=True),
    "seed": _Range(int, 0, 2**63 - 1),
    "timeout": _Range(float, 0, 3600, above=True),
    "num_beams": _Range(int, 1, MAX_BEAMS),
    "length_penalty": _Range(float, -10, 10),
    "no_repeat_ngram_size": _Range(int, 0, 65536),
    "repetition_penalty": _Range(float, 0, 100, above=True),
}
_HELP: dict[str, str] = {
    "prompt": "Text that the caption continues; of a model that takes instructions, what it is to do.",
    "task": "What the model is asked to do, such as `detailed_caption`, for models that have tasks: `tasks` of "
    "/startup lists them. The default is the first of these.",
    "max_new_tokens": "Tokens to generate at most. The default, which is also -1, is the model's.",
    "min_new_tokens": "Tokens to generate at least, as far as `max_new_tokens` allows.",
    "min_length": "The same, but counted as transformers does: with the start token and the prompt.",
    "temperature": "0 takes the most likely token each time; above 0 samples.",
    "top_k": "Sample among the k most likely tokens only; 0 and -1 are all of them.",
    "top_p": "Sample among the most likely tokens that together reach this probability only.",
    "seed": "Makes sampling repeatable. Without it, or with -1, each request samples differently.",
    "timeout": "Seconds this request may take at most; the server's own limit holds too.",
    "num_beams": "Above 1: beam search with so many beams, each a row of a batch. Not with a temperature above 0.",
    "length_penalty": "Beam search divides a score by the length to this power: above 0 favours long captions.",
    "early_stopping": "Beam search ends with as many captions as beams (true), when better ones are unlikely "
    "(false), or when none can come any more (never).",
    "no_repeat_ngram_size": "No n-gram of this size comes twice; 0: they may.",
    "repetition_penalty": "Above 1 makes tokens that are there already less likely, below 1 more.",
}
NAMES: tuple[str, ...] = tuple(_HELP)
# Their -1 is "not given", as vLLM and llama.cpp have it, and the clients that are made for these.
_UNSET = -1
_MAY_BE_UNSET = frozenset({"max_new_tokens", "top_k", "seed"})
_EARLY: Mapping[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}


def options_from_text(
    pairs: Iterable[tuple[str, str]],
    base: CaptionOptions = CaptionOptions(),  # noqa: B008 - frozen
) -> CaptionOptions:
    """From query parameters or form fields, each at most once, over `base`. An empty text is an option that is not
    given: browsers send each field of a form.

    Raises UnknownOption, InvalidOption, PromptTooLong."""
    values: dict[str, Any] = {}
    for name, text in pairs:
        _known(name)
        if not text:
            continue
        if name in values:
            raise InvalidOption(name, "be given once")
        values[name] = _value_from_text(name, text)
    return _checked(values, base)


def options_from_json(values: Mapping[str, Any], base: CaptionOptions) -> CaptionOptions:
    """From the members of a JSON object, over `base`; null means the default.

    Raises UnknownOption, InvalidOption, PromptTooLong."""
    for name in values:
        _known(name)
    return _checked({name: value for name, value in values.items() if value is not None}, base)


def schema() -> dict[str, dict[str, Any]]:
    """JSON schema of each option, by name."""
    properties: dict[str, dict[str, Any]] = {
        "prompt": {"type": "string", "maxLength": MAX_PROMPT_CHARACTERS, "default": ""},
        "task": {"type": "string", "maxLength": MAX_TASK_CHARACTERS},
    }
    for name, span in _RANGES.items():
        low = "exclusiveMinimum" if span.above else "minimum"
        kind = "integer" if span.kind is int else "number"
        properties[name] = {"type": kind, low: span.low, "maximum": span.high}
        if name in _MAY_BE_UNSET:
            properties[name] = or_unset(properties[name])
        default = getattr(_DEFAULT, name, None)
        if default is not None:
            properties[name]["default"] = default
    properties["early_stopping"] = {"enum": [*_EARLY.values()], "default": False}
    return {name: {**properties[name], "description": _HELP[name]} for name in NAMES}


def or_unset(numbers: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of whole numbers, or of -1."""
    if numbers["minimum"] == 0:
        return {**numbers, "minimum": _UNSET}
    return {"anyOf": [numbers, {"const": _UNSET}]}


def integer(value: Any) -> int | None:
    """The number if it is whole, else None. To JSON, and to JSON Schema, 5.0 is 5; to Python, true is 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def _known(name: str) -> None:
    if name not in _HELP:
        raise UnknownOption(name, NAMES)


def _value_from_text(name: str, text: str) -> Any:
    if name in ("prompt", "task"):
        return text
    if name == "early_stopping":
        return _EARLY.get(text.lower(), text)
    return _number_from_text(name, text)


def _number_from_text(name: str, text: str) -> float:
    span = _RANGES[name]
    pattern = r"[+-]?[0-9]{1,20}" if span.kind is int else r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"
    if len(text) > 64 or not re.fullmatch(pattern, text):
        raise InvalidOption(name, span.sentence())
    return span.kind(text)


def _checked(values: dict[str, Any], base: CaptionOptions) -> CaptionOptions:
    for name in _MAY_BE_UNSET & values.keys():
        if integer(values[name]) == _UNSET:
            del values[name]
    if not values:
        return base
    for name, value in values.items():
        if name == "prompt":
            _check_prompt(value)
            continue
        if name == "task":
            if not isinstance(value, str) or len(value) > MAX_TASK_CHARACTERS:
                raise InvalidOption(name, f"be text of at most {MAX_TASK_CHARACTERS} characters")
            continue
        if name == "early_stopping":
            # To Python, 1 is true.
            if not (isinstance(value, bool) or value == "never"):
                raise InvalidOption(name, "be true, false or never")
            continue
        span = _RANGES[name]
        number = _number(value, span.kind)
        if number is None or not span.holds(number):
            raise InvalidOption(name, span.sentence())
        values[name] = span.kind(number)
    named = base.named | values.keys()
    own = {name: values.pop(name) for name in ("prompt", "timeout", "task") if name in values}
    options = replace(base, **own, named=named, sampling=replace(base.sampling, **values))
    if options.sampling.searches and options.sampling.samples:
        raise InvalidOption("num_beams", "be 1 with a temperature above 0; a beam search does not sample")
    return options


def _number(value: Any, kind: type[int] | type[float]) -> float | None:
    if kind is int:
        return integer(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _check_prompt(value: object) -> None:
    if not isinstance(value, str):
        raise InvalidOption("prompt", "be text")
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise PromptTooLong(f"The prompt has {len(value)} characters; send at most {MAX_PROMPT_CHARACTERS}.")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        raise InvalidOption("prompt", "be valid Unicode text") from None
