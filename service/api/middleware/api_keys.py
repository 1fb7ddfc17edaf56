"""Reads the file of API keys, and checks the keys that clients send."""

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from snapcap.service.config.reader import SettingsError

_logger = logging.getLogger("snapcap.server")
# The syntax of a bearer token (RFC 6750, b64token).
_KEY = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


class ApiKeys:
    """Checks keys against digests; keeps no key. The time of a check does not depend on the sent or the matching
    key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def accept(self, key: bytes) -> bool:
        """Tells whether `key` is one of the keys."""
        digest = hashlib.sha256(key).digest()
        accepted = False
        for known in self._digests:
            accepted |= hmac.compare_digest(digest, known)
        return accepted


def read_api_keys(file: Path) -> ApiKeys:
    """Reads one key a line. Skips empty lines and lines that begin with #.

    Raises SettingsError if the file cannot be read, a line is not a key, or the file has no key. Logs a warning if
    all users of the machine may read the file."""
    try:
        lines = file.read_text("utf-8").splitlines()
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SettingsError(f"--api-key-file {file} cannot be read: {reason}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            # The message leaves the line out: messages go to a log.
            raise SettingsError(
                f"--api-key-file {file} line {number} is not a key: use letters, digits and -._~+/ only"
            )
        keys.append(key)
    if not keys:
        raise SettingsError(f"--api-key-file {file} has no key: write one a line, or leave the option out")
    if mode & stat.S_IROTH:
        _logger.warning("everybody may read the API keys", extra={"fields": {"file": str(file), "do": "chmod 600"}})
    return ApiKeys(keys)
