"""Defines the names of regions, and the code of a forced end token. Imports no torch."""

from typing import Any

PENALTIES, SAMPLING, BEAMS = "decoder_penalties", "decoder_sampling", "decoder_beams"
# Regions that run only for requests that ask for them. No start waits for them.
ON_DEMAND = frozenset({PENALTIES, SAMPLING, BEAMS})


def forced_end(token: Any) -> Any:
    """Returns the number in ``forced`` that makes a beam which gets that far end with ``token``.

    The number is below -1, and any number below 0 lets the beams choose, so it never looks like a prompt's token.
    """
    return -2 - token


def stage(number: int) -> tuple[str, str]:
    """Returns the names of the two regions of a vision stage, counted from 1: the one before its blocks, and the
    block."""
    part = "" if number == 1 else f"_{number}"
    return f"encoder_before{part}", f"encoder_block{part}"
