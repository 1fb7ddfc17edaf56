"""Reports what this machine denies although only work is saved by it: each thing once."""

import functools
import logging

_logger = logging.getLogger("snapcap.machine")


@functools.cache
def report_denied(what: str, effect: str, reason: str) -> None:
    """Log the first denial of a kind in this process.

    Args:
        what: the call that the system refuses, such as "flock".
        effect: what this program does instead.
        reason: what the system says.
    """
    _logger.warning("%s is not available: %s", what, effect, extra={"fields": {"reason": reason}})
