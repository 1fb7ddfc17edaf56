"""Judges a device by its failed turns: fail their requests and go on, or give the device up. No torch."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from snapcap.models.errors import UserError

if TYPE_CHECKING:
    from snapcap.warmup.runtime.devices.device import DeviceHealth

# Whatever it is, what fails every time does not get better by more requests that fail.
MAX_CONSECUTIVE_FAILURES = 3
# Memory that others hold may be free again a moment later, and who is started instead would have less of it. But a
# server that has had none for so long serves nobody; in a fleet, others can.
OUT_OF_MEMORY_S = 60.0


class DeviceFailedError(UserError):
    """The device cannot be used any more; one line that says why. Its cause has the trace."""


class DeviceFailures:
    """Those since the last turn that went well. Device thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.count = 0
        self._since = 0.0
        self._memory_only = True

    def none(self) -> None:
        """A turn went well."""
        self.count = 0

    def judge(self, error: Exception, health: "DeviceHealth") -> None:
        """One more turn has failed; ``health`` is what the device says when it is asked.

        Raises:
            DeviceFailedError: it must be given up.
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
