"""Reads the sample image, which is decoded before any client's.

The parent of the decode processes decodes it before it forks them, and the rehearsal captions it.
"""

from pathlib import Path


def picture() -> bytes:
    """A JPEG of 500 x 375 pixels, as clients send them: a file, as the HTTP process may have no Pillow."""
    return Path(__file__).with_name("sample.jpg").read_bytes()
