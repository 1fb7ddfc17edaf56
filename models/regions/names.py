"""What is known of regions by their names alone. No torch."""

PENALTIES, SAMPLING, BEAMS = "decoder_penalties", "decoder_sampling", "decoder_beams"
# They run only when a request asks for what they do, and no start waits for them.
ON_DEMAND = frozenset({PENALTIES, SAMPLING, BEAMS})
