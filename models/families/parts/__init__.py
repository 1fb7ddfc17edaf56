"""Reads the encoders and decoders that several families are made of."""
