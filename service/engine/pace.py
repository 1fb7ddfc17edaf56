"""Estimates from the last completions how long a queue takes."""

from collections import deque


class Pace:
    """The moments of the last completions."""

    def __init__(self) -> None:
        self._completed: deque[float] = deque(maxlen=32)

    def completed(self, moment: float) -> None:
        self._completed.append(moment)

    def retry_after(self, waiting: int) -> float:
        """Seconds until so many requests have gone at the rate of the last; 1 when that is not known."""
        moments = list(self._completed)
        if len(moments) < 2 or moments[-1] <= moments[0]:
            return 1.0
        rate = (len(moments) - 1) / (moments[-1] - moments[0])
        return min(max(waiting / rate, 1.0), 60.0)
