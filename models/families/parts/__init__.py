"""Reads the encoders and decoders that several families consist of."""
