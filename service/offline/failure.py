"""Defines the failure of one image, and the error that ends the whole run.

All modules of `service/offline` report with these two types.
"""

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import ServiceError


@dataclass(frozen=True)
class Failure:
    """Names a file, folder or pattern that gets no caption, and the reason."""

    path: str
    reason: str


class OutputError(Exception):
    """Ends the run because no further caption can be written. The message is one line for the user."""


def reason_of(error: BaseException) -> str:
    """Returns the message of an error as one line. The message of an OSError comes without the path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = error.detail if isinstance(error, ServiceError) else str(error)
    return " ".join(text.split()) or type(error).__name__
