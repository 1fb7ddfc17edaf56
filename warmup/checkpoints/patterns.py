"""Selects the files that make up a checkpoint, and defines the error when it cannot be had.

Nothing else is downloaded. An index of weights decides about their files, whatever they are called.
"""

import logging
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from snapcap.models.errors import UserError

ADAPTER = "adapter_config.json"  # PEFT's, which comes along so that the refusal can name what it adapts
METADATA = (
    "config.json",
    ADAPTER,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
)

OUTAGE_S = 10.0  # in which a source must say which revision it has, where this machine has one already
_logger = logging.getLogger("snapcap.start")


class CheckpointError(UserError):
    """A checkpoint that cannot be had; one line that says what to do."""


def report_unasked(source: str, error: object) -> None:
    """Log that a start uses the revision that this machine has, as nobody says which one the source has.

    Args:
        error: why the source does not say; without a text it took too long.
    """
    reason = " ".join(str(error).split()) or f"no answer within {OUTAGE_S:g} s"
    fields = {"model": source, "reason": reason}
    _logger.warning(
        "the source of the model does not answer; the copy on this disk is used", extra={"fields": fields}
    )


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that one of the patterns fits, in their order."""
    wanted = tuple(patterns)
    return [name for name in names if name.isprintable() and any(fnmatchcase(name, each) for each in wanted)]


def checkpoint_names(names: Iterable[str], read: Callable[[str], bytes]) -> list[str]:
    """The names to download: what describes the model, and what holds its weights, which may be in folders below.

    Args:
        names: those of the checkpoint's own folder.
        read: the content of an index of weights.

    Raises:
        CheckpointError: the index is none, or names what cannot be a file of the checkpoint.
    """
    from snapcap.models.errors import WeightsError  # noqa: PLC0415  only downloads need it
    from snapcap.models.weights.listing import choose_weights  # noqa: PLC0415  only downloads need it

    every = list(names)
    try:
        weights = choose_weights(set(every).__contains__, read)
    except WeightsError as error:
        raise CheckpointError(str(error)) from error
    described = [name for name in matching(every, METADATA) if "/" not in name]
    return described + [name for name in weights if name not in described]
