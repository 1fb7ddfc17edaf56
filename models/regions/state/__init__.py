"""Lays out the buffers that regions read and write: K/V caches and beams."""
