"""Names the ways in which an image cannot be read, each with a reason for metrics and what to do. No Pillow.

It stands alone for what it does not import: the HTTP process, which has no Pillow, knows the reasons too.
"""

from typing import Literal

Reason = Literal[
    "empty",
    "not_an_image",
    "truncated",
    "too_large",
    "too_complex",
    "zero_size",
    "unsupported_format",
    "wrong_size",
]


class ImageError(ValueError):
    """A picture that cannot be read. The message says what to do; ``reason`` is a label for metrics."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NeedsMemory(Exception):  # noqa: N818  the picture may be a good one
    """A picture that takes more to be decoded than was granted; not a pixel of it has been. ``size`` in bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"it takes {size} bytes to decode")
        self.size = size
