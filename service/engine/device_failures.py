"""Judges a device by its failed turns: fail their requests and go on, or give the device up. No torch."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from snapcap.models.errors import UserError

if TYPE_CHECKING:
    from snapcap.warmup.runtime.devices import DeviceHealth

# After so many failed turns in a row the fault is lasting, whatever it is: further requests would only fail too.
MAX_CONSECUTIVE_FAILURES = 3
# Seconds without device memory after which the device is given up. Memory that other processes hold may be free
# again a moment later, and a restarted server would get less of it. But a server that has had no memory for so long
# serves nobody, while another server of a fleet can.
OUT_OF_MEMORY_S = 60.0


class DeviceFailedError(UserError):
    """The device cannot be used any more. The message is one line that says why; `__cause__` has the traceback."""


class DeviceFailures:
    """Counts the failed turns since the last turn that succeeded. Only the device thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.count = 0
        self._since = 0.0
        self._memory_only = True

    def none(self) -> None:
        """Resets the count, because a turn succeeded."""
        self.count = 0

    def judge(self, error: Exception, health: "DeviceHealth") -> None:
        """Counts one more failed turn. ``health`` is the state that the device reports after it.

        Raises:
            DeviceFailedError: the device must be given up.
        """
        self.count += 1
        if self.count == 1:
            self._since, self._memory_only = self._clock(), True
        self._memory_only = self._memory_only and health == "out_of_memory"
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if health == "lost":
            raise DeviceFailedError(f"the device is lost: {cause}") from error
        if self.count < MAX_CONSECUTIVE_FAILURES:
            return
        seconds = self._clock() - self._since
        if not self._memory_only:
            raise DeviceFailedError(
                f"the device failed {self.count} times in a row, the last with: {cause}"
            ) from error
        if seconds >= OUT_OF_MEMORY_S:
            raise DeviceFailedError(f"the device has been out of memory for {seconds:.0f} s: {cause}") from error
