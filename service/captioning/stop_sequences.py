"""Trims a caption while it is generated, and ends it before a stop sequence.

The library imports this module, which imports no event loop.
"""

from collections.abc import Sequence


class CaptionText:
    """Takes text in pieces of any size, and returns it in pieces that are final.

    Text that may be the beginning of a stop sequence, and trailing space, is held back until more text follows.
    """

    def __init__(self, stop: Sequence[str] = (), *, keep_leading_space: bool = False) -> None:
        """Starts a text. `keep_leading_space` is for a text that continues a prompt."""
        self._stop = tuple(stop)
        self._begun = keep_leading_space
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once a stop sequence has come. The text ends before the stop sequence."""
        return self._stopped

    def push(self, piece: str) -> str:
        """Adds a piece. Returns the text that has become final, which is often empty."""
        if self._stopped:
            return ""
        self._held += piece
        if not self._begun:
            self._held = self._held.lstrip()
            self._begun = bool(self._held)
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._stopped = True
            return self._release(min(found))
        return self._release(len(self._held) - self._possible_stop())

    def end(self) -> str:
        """Returns the held-back text when no piece follows."""
        return "" if self._stopped else self._release(len(self._held))

    def _release(self, end: int) -> str:
        shown = self._held[:end].rstrip()
        self._held = self._held[len(shown) :]
        return shown

    def _possible_stop(self) -> int:
        """Returns the length of the longest suffix of the text that begins a stop sequence."""
        longest = min(len(self._held), max((len(stop) for stop in self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
