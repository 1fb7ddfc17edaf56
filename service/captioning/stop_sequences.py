"""Trims a text while it is being generated, and ends it before a stop sequence."""

from collections.abc import Sequence


class CaptionText:
    """Takes the text in pieces of any size and gives the same text in pieces that are never taken back.

    What may still turn out to be the beginning of a stop sequence, or space at the end, waits for what follows."""

    def __init__(self, stop: Sequence[str] = (), *, keep_leading_space: bool = False) -> None:
        """`keep_leading_space`: the text continues a prompt."""
        self._stop = tuple(stop)
        self._begun = keep_leading_space
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop sequence has come: the text has ended before it."""
        return self._stopped

    def push(self, piece: str) -> str:
        """Returns the text that this piece makes safe to show; often empty."""
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
        """The rest, when nothing follows."""
        return "" if self._stopped else self._release(len(self._held))

    def _release(self, end: int) -> str:
        shown = self._held[:end].rstrip()
        self._held = self._held[len(shown) :]
        return shown

    def _possible_stop(self) -> int:
        """The length of the longest end of the text with which a stop sequence begins."""
        longest = min(len(self._held), max((len(stop) for stop in self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
