"""Reads the sample image, which is decoded before any client's.

The parent of the decode processes decodes it before it forks them, and the self-test captions it.
"""

from pathlib import Path


def picture() -> bytes:
    """Returns a JPEG of 500 x 375 pixels. The image is a file, because the HTTP process may lack Pillow to make
    one."""
    return Path(__file__).with_name("sample.jpg").read_bytes()
