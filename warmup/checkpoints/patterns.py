"""Selects the files that make up a checkpoint, and defines the error when it cannot be had.

Nothing else is downloaded.
"""

import logging
from collections.abc import Iterable
from fnmatch import fnmatchcase

from snapcap.models.errors import UserError

METADATA = (
    "config.json",
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
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")


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


def checkpoint_names(names: Iterable[str]) -> list[str]:
    """The names to download: what describes the model, and its safetensors or, without any, its pickles."""
    every = list(names)
    return matching(every, METADATA) + (matching(every, SAFETENSORS) or matching(every, PICKLES))


def is_checkpoint_name(name: str) -> bool:
    """Whether ``checkpoint_names`` could have named it: the only files that a folder of downloads has of ours."""
    return "/" not in name and bool(matching([name], METADATA + SAFETENSORS + PICKLES))
