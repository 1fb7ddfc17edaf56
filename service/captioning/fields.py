"""Sorts the fields of a request, for every API: those that are read, those that must not be there, and the rest.

Clients send whatever some server takes. A field that does not change a caption never refuses one: it is ignored,
and the header X-Snapcap-Ignored names it. Two kinds of fields are refused. The first would change the caption if it
were served; a value that changes nothing is taken. The second has nearly the name of an option, which is a mistake.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import near_words
from snapcap.service.captioning.options import NAMES
from snapcap.service.errors import InvalidOption, UnknownOption, UnsupportedOption

# Each takes up to 0.1 ms to compare with the names of the options.
MAX_UNKNOWN = 64
# A value of a field that is not read is as good as none if it is one of these.
EMPTY: tuple[Any, ...] = ("", [], {})
# Fields that change captions in some API and are not served in others, each with the values that change nothing.
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
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
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
    "images": (),  # pictures that would be passed over
}
# difflib's ratio from which on a name is a mistake for an option's: `promt` and `max_token` have more, `prompt_id`
# and `store` less.
_NEARLY = 0.81


@dataclass(frozen=True)
class Fields:
    """`known` has the fields that are read, with their values; `ignored` the names of those that nobody reads."""

    known: list[tuple[str, Any]]
    ignored: tuple[str, ...]


def sort_fields(
    given: Iterable[tuple[str, Any]],
    known: Collection[str],
    options: Collection[str] = NAMES,
    within: str = "",
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
) -> Fields:
    """Sorts fields of JSON, or of a query or a form, whose values are text. A null is as good as no field.

    `options`: the names that an unknown field must not nearly have. `within`: the member in which these options
    stand, if it is not the one that is sorted. Raises UnknownOption, UnsupportedOption, InvalidOption."""
    read: list[tuple[str, Any]] = []
    unknown: list[tuple[str, Any]] = []
    for name, value in given:
        if value is None:
            continue
        if name in known:
            read.append((name, value))
        elif name in neutral:
            _check_neutral(name, value, (*neutral[name], *EMPTY))
        elif len(unknown) == MAX_UNKNOWN:
            raise InvalidOption(name[:64], f"be left out; {MAX_UNKNOWN} other fields are unknown already")
        elif near_words(name[:64], options, _NEARLY):
            raise UnknownOption(name, options, within)
        else:
            unknown.append((name, value))
    return Fields(read, tuple(name for name, value in unknown if value not in EMPTY))


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if any(_same(value, each) for each in neutral):
        return
    choices = " or ".join(json.dumps(each) for each in neutral if each not in EMPTY)
    raise UnsupportedOption(name, f"leave it out or send {choices}" if choices else "leave it out")


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, str) and not isinstance(other, str):  # a form and a query have texts alone
        return value == json.dumps(other)
    # To Python, true is 1.
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
