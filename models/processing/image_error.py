"""Names the ways in which an image cannot be read, each with a reason for metrics and a remedy.

The module imports no Pillow, because the HTTP process has none and needs the reasons too.
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
    """A picture that cannot be read. The message says what to do. ``reason`` is a label for metrics."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NeedsMemory(Exception):  # noqa: N818 - the picture may be a good one
    """A picture that needs more memory than was granted: ``size`` bytes. No pixel of it was decoded."""

    def __init__(self, size: int) -> None:
        super().__init__(f"it takes {size} bytes to decode")
        self.size = size
