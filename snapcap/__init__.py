"""Captions images, with a start that waits for nothing it does not need."""
