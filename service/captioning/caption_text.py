"""Ends captions before a stop sequence and shortens them for alt text, while they are generated.

The library imports this module, which imports no event loop.
"""

import re
from collections.abc import Sequence

from snapcap.models.dataclass import dataclass

FEWEST_CHARS = 16  # below, many a caption would lose its first word
# Beginnings are looked for in so many characters, so that a stream need not wait for more.
_LEAD_CHARS = 64
_MEDIUM = r"(?:images?|pictures?|photos?|photographs?|snapshot)"
_SHOWS = (
    r"(?:(?:clearly\s|appears?\sto\s)?(?:shows?|depicts?|features?|displays?|portrays?|captures?|presents?|showcases?"
    r"|illustrates?|contains?)|(?:we|you|one)\scan\ssee|there\s(?:is|are)|is\sof)"
)
_LEAD = re.compile(
    rf"(?:(?:in\s)?(?:this|the|these)\s{_MEDIUM},?\s{_SHOWS}"
    rf"|(?:(?:this|that|here|it)\sis\s)?(?:(?:an?|the|this)\s)?{_MEDIUM}\s(?:of|showing|depicting|featuring))"
    r"[,:]?\s+(?=\S)",
    re.IGNORECASE,
)
# The end of a sentence: its marks and closing quotes before a space, but not the point of an initial, a title or
# another short form that stands before a name or a number. A run of marks is matched from its beginning and as a
# whole only: otherwise the time would grow with its square.
_SENTENCE = re.compile(
    r"(?:(?<!\b[A-Za-z])(?<!\b(?:[MDJS]r|Ms|[SMF]t|Lt|No|vs))(?<!\b(?:Mrs|Gen|Sgt|Rev|Ave))(?<!\b(?:Prof|Capt))\."
    r"|[!?…]|(?<![.!?…])[.!?…]{2,}+)[\"'”’)\]]*(?=\s)|[。！？]+"
)
# A character of a script that is written without spaces, such as Chinese: the text may be cut on each side of it.
# Korean has spaces between its words.
_UNSPACED = re.compile(r"[\u2e80-\u312f\u3190-\ua4cf\uf900-\ufaff\uff00-\uff9f\uffe0-\uffef\U00020000-\U0003ffff]")
# Space and marks with which no shortened caption ends.
_LOOSE = " \t\n\u3000,;:，、；：–—-"


@dataclass(frozen=True)
class Style:
    """Holds how captions are shortened. `max_chars`: the most characters of a caption, None for any number.
    `trim_lead`: remove a beginning such as "a picture of"."""

    max_chars: int | None = None
    trim_lead: bool = False

    def __bool__(self) -> bool:
        """Tells whether the style changes any caption."""
        return self.trim_lead or self.max_chars is not None

    def span(self, text: str) -> tuple[int, int]:
        """Returns where the part of a caption that stays begins and ends.

        A caption that is too long ends with its last sentence that fits, or else with the last word that fits. If
        not even the first word fits, nothing stays."""
        lead = _LEAD.match(text[:_LEAD_CHARS]) if self.trim_lead else None
        start = lead.end() if lead else 0
        if self.max_chars is None or len(text) - start <= self.max_chars:
            return start, len(text)
        return start, _end(text, start, start + self.max_chars)

    def applied(self, text: str, since: int = 0) -> str:
        """Returns the part of a caption that stays, from character `since` on. The part begins with a capital
        letter if the caption did."""
        start, end = self.span(text)
        if since > start or not start:
            return text[max(start, since) : end]
        first = text[start].upper() if text[0].isupper() else text[start]
        return first + text[start + 1 : end]


def _end(text: str, start: int, most: int) -> int:
    """Returns the end of the last sentence, or else of the last word, that ends at `most` or before."""
    ends = [found.end() for found in _SENTENCE.finditer(text, start, most + 1) if found.end() <= most]
    if ends:
        return ends[-1]
    at = most
    while at > start and not (text[at].isspace() or _UNSPACED.match(text[at]) or _UNSPACED.match(text[at - 1])):
        at -= 1
    return start + len(text[start:at].rstrip(_LOOSE))


class CaptionText:
    """Takes text in pieces of any size, and returns it in pieces that are final.

    Text that may be the beginning of a stop sequence, and trailing space, is held back until more text follows.
    """

    def __init__(self, stop: Sequence[str] = (), *, keep_leading_space: bool = False) -> None:
        """Starts a text. `keep_leading_space` is for a text that continues a prompt."""
        self._stop = tuple(stop)
        self._begun = keep_leading_space
        self._held = ""
        self.stopped = False  # True once a stop sequence has come, before which the text ends

    def push(self, piece: str) -> str:
        """Adds a piece. Returns the text that has become final, which is often empty."""
        if self.stopped:
            return ""
        self._held += piece
        if not self._begun:
            self._held = self._held.lstrip()
            self._begun = bool(self._held)
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        return self._release(len(self._held) - self._possible_stop())

    def end(self) -> str:
        """Returns the held-back text when no piece follows."""
        return "" if self.stopped else self._release(len(self._held))

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


class StyledText(CaptionText):
    """Takes a caption in pieces as `CaptionText` does, and returns the pieces of the shortened caption.

    Text is held back until its beginning is known, and until the end of the caption if it may be cut."""

    def __init__(self, style: Style, before: str, stop: Sequence[str], *, keep_leading_space: bool) -> None:
        """`before`: the prompt that the caption begins with and the pieces do not; "" if there is none."""
        super().__init__(stop, keep_leading_space=keep_leading_space)
        self._style = style
        self._since = len(before)
        self._whole = before
        self._passes = False  # True once the beginning is known and no text is held back

    def push(self, piece: str) -> str:
        final = super().push(piece)
        if self._passes:
            return final
        self._whole += final
        if self.stopped:
            return self._shown()
        if self._style.max_chars is not None or len(self._whole) < _LEAD_CHARS:
            return ""
        self._passes = True
        return self._shown()

    def end(self) -> str:
        final = super().end()
        if self._passes or self.stopped:
            return final
        self._whole += final
        return self._shown()

    def _shown(self) -> str:
        return self._style.applied(self._whole, self._since)
