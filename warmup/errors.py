"""Defines the errors of a start and a build, and describes any error in one line that says what to do."""

import errno
import re

from snapcap.models.errors import UserError, headline


class StartError(UserError):
    """Names in one line a setting that this model or this machine does not support."""


class BuildError(UserError):
    """Says in one line why a build cannot begin, and what to do."""


_ADVICE = {
    errno.EEXIST: "a file is in the way; choose another folder",
    errno.ENOTDIR: "a file is in the way; choose another folder",
    errno.ENOSPC: "free some there, or choose another folder",
    errno.EDQUOT: "free some there, or choose another folder",
    errno.EROFS: "make it writable, or choose another folder",
    errno.EACCES: "check who owns it and its mode, or choose another folder",
    errno.EPERM: "check who owns it and its mode, or choose another folder",
}


def os_error_text(error: OSError) -> str:
    """Describes an error of a file or folder, followed by advice if there is any."""
    text = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0)
    return f"{text}; {advice}" if advice else text


def without_passwords(text: str) -> str:
    """Returns a text without the users and passwords of URLs in it: everybody may read the errors in /startup."""
    return re.sub(r"//[^/@\s]*@", "//…@", text)


def one_line(error: BaseException) -> str:
    """Describes the error of a failed start on one line, for the log, /readyz and /startup."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}" if unexpected(error) else text


def unexpected(error: BaseException) -> BaseException | None:
    """Returns the error if the user cannot fix it, else None. The log must have the traceback of such an error."""
    return None if isinstance(error, UserError) else error


def first_line(error: BaseException) -> str:
    """Shortens a compiler's error to its first line and the line of our source that it names."""
    text = str(error).strip()
    # Export errors are pages long. Their first line names the cause; "from user code" shows the region's line.
    place = text[text.rfind("File ") :].splitlines()[:2] if "File " in text else []
    return " — ".join([headline(error), *(" ".join(part.split()) for part in place)])[:2000]
