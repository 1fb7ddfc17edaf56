"""Computes the parts that only Florence-2 has: its image encoder, and BART's encoder in front of the decoder."""
