"""Sorts the fields of a request, for every API, into fields that are read, ignored or refused.

Clients send every field that some other server takes. A field that does not change a caption is ignored, and the
header X-Snapcap-Ignored names it. Two kinds of fields are refused: a field that would change the caption if it
were served, unless its value changes nothing, and a field whose name is nearly an option's, which is probably a
misspelling.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import near_words
from snapcap.service.captioning.options import NAMES
from snapcap.service.errors import InvalidOption, UnknownOption, UnsupportedOption

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
    instead = f"leave it out or send {choices}" if choices else "leave it out"
    if name in _OF_CHECKPOINTS:
        instead += "; it holds for all requests where the model's generation_config.json sets it"
    raise UnsupportedOption(name, instead)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, str) and not isinstance(other, str):  # values of a form or query are always text
        return value == json.dumps(other)
    # In Python, True equals 1, so the types are compared too.
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
