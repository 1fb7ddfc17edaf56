"""Defines the failure of one image, and the error that ends the whole run.

Finding, reading, captioning and writing all fail by these.
"""

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import ServiceError


@dataclass(frozen=True)
class Failure:
    """A file or folder that gets no caption, and why."""

    path: str
    reason: str


class OutputError(Exception):
    """Captions cannot be written any more. The message is a line for the user."""


def reason_of(error: BaseException) -> str:
    """A line without the path, which `str` of an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = error.detail if isinstance(error, ServiceError) else str(error)
    return " ".join(text.split()) or type(error).__name__
