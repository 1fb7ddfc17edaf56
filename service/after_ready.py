"""Work that nobody waits for, put off until whoever waited for READY has had their first reply."""

import threading
from collections.abc import Callable

# The first request would be held up by what begins beside it: imports, processes, work between two steps.
AFTER_READY_S = 0.5


def after_ready(work: Callable[[], object], seconds: float = AFTER_READY_S) -> threading.Timer:
    """Do it so many seconds from now, on a thread of its own; cancel the result to leave it undone."""
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
    return timer
