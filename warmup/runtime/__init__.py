"""Runs regions: one set of buffers, a backend, and the choice of tokens."""
