"""What is known of regions by their names alone. No torch."""

from typing import Any

PENALTIES, SAMPLING, BEAMS = "decoder_penalties", "decoder_sampling", "decoder_beams"
# They run only when a request asks for what they do, and no start waits for them.
ON_DEMAND = frozenset({PENALTIES, SAMPLING, BEAMS})


def forced_end(token: Any) -> Any:
    """What stands among forced tokens where a beam that comes so far must end, with this token: below -1, as any
    number below 0 leaves the choice to the beams."""
    return -2 - token


def stage(number: int) -> tuple[str, str]:
    """The regions of a vision stage, counted from 1: what comes before its blocks, and a block."""
    part = "" if number == 1 else f"_{number}"
    return f"encoder_before{part}", f"encoder_block{part}"
