"""Declares each option of a caption once, parses options, and sorts the fields of a request.

To add an option, add a line to `OPTIONS`, its type to `OptionValues` and, if it decides how tokens are chosen, a
field to `SamplingParams`, else to `CaptionOptions`. The APIs, `snapcap caption`, `Captioner` and the OpenAPI
document then have the option. Update docs/api.md with `python tests/support/documents/tables.py docs/api.md`.

An option arrives as text (query parameter, form field, argument) or as a JSON value. Text is parsed to the
option's type; a JSON value must have that type already.

Clients send every field that some other server takes. A field that does not change a caption is ignored, and the
header X-Snapcap-Ignored names it. Two kinds of fields are refused: a field that would change the caption if it
were served, unless its value changes nothing, and a field whose name is nearly an option's, which is probably a
misspelling.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypedDict

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS
from snapcap.models.errors import near_words
from snapcap.models.text import Dialogue
from snapcap.service.captioning.caption_text import FEWEST_CHARS
from snapcap.service.errors import InvalidOption, PromptTooLong, UnknownOption, UnsupportedOption
from snapcap.warmup.runtime.slot_request import SamplingParams

_UNSET = -1
# Words of a form or query for true and false. Browsers send `on` for a box that is ticked.
_SWITCH: Mapping[str, bool] = {
    **dict.fromkeys(("true", "on", "yes", "1"), True),
    **dict.fromkeys(("false", "off", "no", "0"), False),
}


@dataclass(frozen=True)
class CaptionOptions:
    """Holds the options of one request; None means the server's default. `timeout` is in seconds and can only
    shorten the server's time limit. `max_chars` and `trim_lead`: see `Style`.

    `clamp` reduces a `max_new_tokens` above the model's maximum to that maximum, because clients of other APIs
    send bounds without knowing the model. `named`: options that the request sets, which override the model's
    defaults. `model`: name of the model; "": the first. `around`: the other messages of a conversation. `ignored`:
    fields of the request that are not read; the reply names them.
    """

    prompt: str = ""
    sampling: SamplingParams = SamplingParams()
    timeout: float | None = None
    clamp: bool = False
    task: str = ""
    task_text: str = ""
    max_chars: int | None = None
    trim_lead: bool = False
    model: str = ""
    around: Dialogue = Dialogue()
    named: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()

    def ignoring(self, *names: str) -> "CaptionOptions":
        """Returns the same options with more names of ignored fields."""
        return replace(self, ignored=(*self.ignored, *names)) if names else self


@dataclass(frozen=True)
class Number:
    """Accepts a number from `low` to `high`; `above` excludes `low`.

    If `unset` is true, -1 means that the option is not given, as in vLLM, llama.cpp and their clients.
    """

    kind: type[int] | type[float]
    low: float
    high: float
    above: bool = False
    unset: bool = False

    @property
    def values(self) -> str:
        """Description of the accepted numbers, for messages and the documents."""
        noun = "a whole number" if self.kind is int else "a number"
        low, high = (each if self.kind is int else format(each, "g") for each in (self.low, self.high))
        return f"{noun} above {low} and at most {high}" if self.above else f"{noun} from {low} to {high}"

    def read(self, text: str) -> Any:
        """Returns the number that a text spells, or the text itself, which `checked` refuses. 5.0 is a whole
        number, as in JSON."""
        whole = r" *([+-]?[0-9]{1,20})(?:\.0{0,20})? *"
        decimal = r" *([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?) *"
        number = re.fullmatch(whole if self.kind is int else decimal, text) if len(text) <= 64 else None
        return self.kind(number[1]) if number else text

    def checked(self, name: str, value: Any) -> float:
        """Returns the value as `kind`. Raises InvalidOption if it is no such number."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        number = integer(value) if self.kind is int else value if is_number else None
        if number is None or not self.low <= number <= self.high or (self.above and number == self.low):
            raise InvalidOption(name, f"be {self.values}")
        return self.kind(number)

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the accepted numbers."""
        low = "exclusiveMinimum" if self.above else "minimum"
        numbers = {"type": "integer" if self.kind is int else "number", low: self.low, "maximum": self.high}
        if not self.unset or self.low < _UNSET:
            return numbers
        return {**numbers, low: _UNSET} if self.low == 0 else {"anyOf": [numbers, {"const": _UNSET}]}


@dataclass(frozen=True)
class Text:
    """Accepts a text of at most `most` characters. `is_prompt` makes a longer text a PromptTooLong error."""

    most: int
    is_prompt: bool = False

    @property
    def values(self) -> str:
        """Description of the accepted texts, for messages and the documents."""
        return f"text of at most {self.most} characters"

    def read(self, text: str) -> Any:
        """Returns the text unchanged."""
        return text

    def checked(self, name: str, value: Any) -> str:
        """Returns the text.

        Raises:
            InvalidOption: the value is not text, is too long, or is not valid Unicode.
            PromptTooLong: the prompt is too long.
        """
        if not isinstance(value, str) or (len(value) > self.most and not self.is_prompt):
            raise InvalidOption(name, "be text" if self.is_prompt else f"be {self.values}")
        if len(value) > self.most:
            raise PromptTooLong(f"The prompt has {len(value)} characters; send at most {self.most}.")
        try:
            value.encode()
        except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
            raise InvalidOption(name, "be valid Unicode text") from None
        return value

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the accepted texts."""
        return {"type": "string", "maxLength": self.most}


@dataclass(frozen=True)
class Switch:
    """Accepts true, false and `word`, as `early_stopping` of transformers accepts "never"; "": no word."""

    word: str = ""

    @property
    def values(self) -> str:
        """Description of the accepted values, for messages and the documents."""
        return f"true, false or {self.word}" if self.word else "true or false"

    def read(self, text: str) -> Any:
        """Returns the value that a text spells, or the text itself, which `checked` refuses unless it is the
        word."""
        return _SWITCH.get(text.lower(), text.lower())

    def checked(self, name: str, value: Any) -> bool | str:
        """Returns the value. Raises InvalidOption if it is not true, false or the word."""
        # In Python, 1 equals True, so the type decides.
        if isinstance(value, bool):
            return bool(value)
        if not self.word or value != self.word:
            raise InvalidOption(name, f"be {self.values}")
        return self.word

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the accepted values."""
        return {"enum": [True, False, *([self.word] if self.word else [])]}


@dataclass(frozen=True)
class Option:
    """Declares an option of a caption. The field of `SamplingParams` or `CaptionOptions` with its name has the
    default.

    default: describes the default in the documents, if it is not a fixed value.
    metavar: the value's name in the help of `snapcap caption`; "" if the command lacks the option or reads it from
        the server option of the same name.
    openai: the option's names in an OpenAI request, of which the last that is given counts; () means its own name.
    ollama: the option's further name in Ollama's `options`, which its own name overrides; "": none.
    """

    kind: Number | Text | Switch
    help: str
    default: str = ""
    metavar: str = ""
    openai: tuple[str, ...] = ()
    ollama: str = ""


OPTIONS: Mapping[str, Option] = {
    "prompt": Option(
        Text(10_000, is_prompt=True),
        "Text that the caption continues; for a model that takes instructions, the instruction.",
        metavar="TEXT",
    ),
    "task": Option(
        Text(64),
        "Task of a model that has tasks, such as `detailed_caption`: `tasks` of /startup lists them.",
        default="the model's first",
    ),
    "task_text": Option(
        Text(4000),
        "Text for a task that takes one, such as a phrase to find in the picture.",
        metavar="TEXT",
    ),
    "max_new_tokens": Option(
        Number(int, 1, 2**31 - 1, unset=True),  # far above any model's limit, because chat clients send 128000
        "Most tokens to generate; -1: the model's default.",
        default="the model's",
        openai=("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens"),
        ollama="num_predict",
    ),
    "min_new_tokens": Option(
        Number(int, 0, 65536),
        "Fewest tokens to generate, as far as `max_new_tokens` allows.",
        default="0",
        metavar="N",
        openai=("min_tokens", "min_new_tokens"),
    ),
    "min_length": Option(
        Number(int, 0, 65536),
        "Fewest tokens of a caption, counted as in transformers: with the start token and the prompt. "
        "`min_new_tokens` overrides it.",
        metavar="N",
    ),
    "temperature": Option(
        Number(float, 0, 2), "0: the most likely token each time; above 0: a sampled token.", metavar="T"
    ),
    "top_k": Option(
        Number(int, 0, 2**31 - 1, unset=True),
        "Sample only among the k most likely tokens; 0 and -1: among all.",
        metavar="K",
    ),
    "top_p": Option(
        Number(float, 0, 1),
        "Sample only among the most likely tokens whose probabilities add up to this number; 0: the most likely "
        "token.",
        metavar="P",
    ),
    "seed": Option(
        Number(int, -(2**63), 2**64 - 1, unset=True),  # programs draw signed and unsigned seeds of 64 bits
        "Makes sampling repeatable. Without a seed, or with -1, each request samples differently.",
        default="none",
        metavar="N",
    ),
    "timeout": Option(
        Number(float, 0, 3600, above=True),
        "Most seconds that this request may take; the server's own limit applies too.",
        default="the server's",
    ),
    "num_beams": Option(
        Number(int, 1, MAX_BEAMS),
        "Number of beams of a beam search, each a row of a batch; 1: no search. Not with a temperature above 0.",
        metavar="N",
    ),
    "length_penalty": Option(
        Number(float, -10, 10),
        "Beam search divides a score by the length to this power: above 0 favours long captions, below 0 short "
        "captions.",
        metavar="P",
    ),
    "early_stopping": Option(
        Switch("never"),
        "When a beam search ends: once there are as many captions as beams (true), once better captions are "
        "unlikely (false), or once they are impossible (never).",
        metavar="WHEN",
    ),
    "no_repeat_ngram_size": Option(
        Number(int, 0, 65536), "Size of n-grams that may not occur twice; 0: no limit.", metavar="N"
    ),
    "repetition_penalty": Option(
        Number(float, 0, 100, above=True),
        "Above 1: tokens of the text so far become less likely; below 1: more likely.",
        metavar="P",
        ollama="repeat_penalty",
    ),
    "max_chars": Option(
        Number(int, FEWEST_CHARS, 65536),
        "Most characters of a caption, the prompt included: a longer caption ends with its last sentence that "
        "fits, or else with the last word that fits.",
        default="none",
        metavar="N",
    ),
    "trim_lead": Option(
        Switch(),
        "Remove a beginning such as `a picture of` or `this image shows` from a caption.",
        metavar="BOOL",
    ),
}
NAMES: tuple[str, ...] = tuple(OPTIONS)


class OptionValues(TypedDict, total=False):
    """Types of the options for programs: editors and type checkers read them. None counts as an option that is not
    given."""

    prompt: str | None
    task: str | None
    task_text: str | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    min_length: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    timeout: float | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    no_repeat_ngram_size: int | None
    repetition_penalty: float | None
    max_chars: int | None
    trim_lead: bool | None


# Limits the time of the comparisons: comparing one name with the option names takes up to 0.1 ms.
MAX_UNKNOWN = 64
# A field with one of these values counts as a field that was not sent, unless the field is read.
EMPTY: tuple[Any, ...] = ("", [], {})
# Fields that change captions in some API and are not served here, each with the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "num_return_sequences": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "use_beam_search": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repeat_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "min_p": (0,),
    "top_a": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_tokens": (0,),
    "max_completion_tokens": (-1,),
    "max_output_tokens": (-1,),
    "max_length": (-1,),
    "n_predict": (-1,),
    "num_predict": (-1,),
    "do_sample": (False,),
    "ignore_eos": (False,),
    "stop": (),
    "stop_sequences": (),
    "stop_token_ids": (),
    "bad_words": (),
    "stop_strings": (),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "force_words_ids": (),
    "constraints": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "renormalize_logits": (False,),
    "token_healing": (False,),
    "watermarking_config": (),
    "logit_bias": (),
    "logits_processors": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "grammar": (),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "images": (),  # ignoring images would change the caption
}
# Fields of `NEUTRAL` that a checkpoint may set for all requests. A device has one table of such rules for all rows,
# so a request cannot bring its own.
_OF_CHECKPOINTS = (
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "forced_bos_token_id"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", "renormalize_logits"),
)
# Least ratio of difflib at which a name counts as a misspelled option. `promt` and `max_token` have a higher
# ratio; `prompt_id` and `store` have a lower one.
_NEARLY = 0.81


def options_from_text(
    pairs: Iterable[tuple[str, str]],
    base: CaptionOptions = CaptionOptions(),  # noqa: B008 - frozen
) -> CaptionOptions:
    """Reads query parameters, form fields or arguments over `base`. An empty text counts as an option that is not
    given, because browsers send every field of a form.

    Raises:
        UnknownOption: there is no option of this name.
        InvalidOption: a value is not accepted, or an option is given twice.
        PromptTooLong: the prompt has too many characters.
    """
    values: dict[str, Any] = {}
    for name, text in pairs:
        option = _known(name)
        if not text:
            continue
        if name in values:
            raise InvalidOption(name, "be given once")
        values[name] = option.kind.read(text)
    return _checked(values, base)


def options_from_json(values: Mapping[str, Any], base: CaptionOptions) -> CaptionOptions:
    """Reads the members of a JSON object over `base`. A null counts as an option that is not given. Raises the
    errors of `options_from_text`."""
    for name in values:
        _known(name)
    return _checked({name: value for name, value in values.items() if value is not None}, base)


def default_of(name: str) -> Any:
    """Returns an option's default value; None if the default depends on the model, the server or chance."""
    base = CaptionOptions()
    return None if OPTIONS[name].default else getattr(base.sampling, name, getattr(base, name, None))


def schema() -> dict[str, dict[str, Any]]:
    """Returns the JSON schema of each option, by name."""
    properties = {}
    for name, option in OPTIONS.items():
        default = default_of(name)
        described = {} if default is None else {"default": default}
        properties[name] = {**option.kind.schema(), **described, "description": option.help}
    return properties


def integer(value: Any) -> int | None:
    """Returns a number as int if it is whole, else None. JSON Schema takes 5.0 as the integer 5. Python takes True
    as 1, so booleans are refused here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


@dataclass(frozen=True)
class Fields:
    """Holds the sorted fields. `known`: names and values of the fields that are read. `ignored`: names of the
    other fields."""

    known: list[tuple[str, Any]]
    ignored: tuple[str, ...]


def sort_fields(
    given: Iterable[tuple[str, Any]],
    known: Collection[str],
    options: Collection[str] = NAMES,
    within: str = "",
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
) -> Fields:
    """Sorts the fields of a JSON object, a query or a form. Values of a query or form are text. A null counts as
    no field.

    `known`: names of the fields that are read. `options`: names that an unknown field's name must not resemble.
    `within`: the member of the body that holds these options, if it is not the sorted object. `neutral`: fields
    that are not served, with the values that change nothing.

    Raises:
        UnknownOption: a field's name resembles an option's.
        UnsupportedOption: a field would change the caption and is not served.
        InvalidOption: more than MAX_UNKNOWN fields are unknown.
    """
    read: list[tuple[str, Any]] = []
    unknown: list[tuple[str, Any]] = []
    for name, value in given:
        if value is None:
            continue
        if name in known:
            read.append((name, value))
        elif name in neutral and any(_same(value, each) for each in (*neutral[name], *EMPTY)):
            continue
        elif name in neutral and not (within and name in options):
            raise _unsupported(name, neutral[name])
        elif len(unknown) == MAX_UNKNOWN:
            raise InvalidOption(name[:64], f"be left out; {MAX_UNKNOWN} other fields are unknown already")
        elif near_words(name[:64], options, _NEARLY):
            raise UnknownOption(name, options, within)
        else:
            unknown.append((name, value))
    return Fields(read, tuple(name for name, value in unknown if value not in EMPTY))


def _known(name: str) -> Option:
    if name not in OPTIONS:
        raise UnknownOption(name, NAMES)
    return OPTIONS[name]


def _checked(values: dict[str, Any], base: CaptionOptions) -> CaptionOptions:
    given: dict[str, Any] = {}
    for name, value in values.items():
        kind = OPTIONS[name].kind
        if not (isinstance(kind, Number) and kind.unset and integer(value) == _UNSET):
            given[name] = kind.checked(name, value)
    if not given:
        return base
    named = base.named | given.keys()
    sampling = {name: given.pop(name) for name in tuple(given) if hasattr(base.sampling, name)}
    options = replace(base, **given, named=named, sampling=replace(base.sampling, **sampling))
    if options.sampling.searches and options.sampling.samples:
        raise InvalidOption("num_beams", "be 1 with a temperature above 0; a beam search does not sample")
    return options


def _unsupported(name: str, neutral: tuple[Any, ...]) -> UnsupportedOption:
    choices = " or ".join(json.dumps(each) for each in neutral)
    instead = f"leave it out or send {choices}" if choices else "leave it out"
    if name in _OF_CHECKPOINTS:
        instead += "; it holds for all requests where the model's generation_config.json sets it"
    return UnsupportedOption(name, instead)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, str) and not isinstance(other, str):  # values of a form or query are always text
        return value == json.dumps(other)
    # In Python, True equals 1, so the types are compared too.
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
