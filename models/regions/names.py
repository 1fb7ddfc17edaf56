"""What is known of regions by their names alone. No torch."""

BEAMS = "decoder_beams"
# They run only when a request asks for what they do, and no start waits for them.
ON_DEMAND = frozenset({BEAMS})
