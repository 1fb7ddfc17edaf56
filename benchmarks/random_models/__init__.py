"""Captioners of random weights in real shapes, one file a family. No transformers, and no torch at import."""
