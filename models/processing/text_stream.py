"""Streams the text of tokens as they are generated, in pieces that are never taken back."""

from collections.abc import Callable, Iterable
from os.path import commonprefix

# What a byte-level decoder puts in place of bytes that are not, or not yet, a character.
INCOMPLETE = "\ufffd"
# A clean-up joins at most three words ("do n ' t"), and the last of them may be still to come.
_UNSETTLED_WORDS = 2

Decode = Callable[[list[int]], str]


class ByteLevelStream:
    """For byte-level BPE, whose text is that of the tokens one after the other: a piece ends with a character."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pending: list[int] = []
        self._sent = 0  # characters of the pending tokens

    def push(self, token: int) -> str:
        """The text that is certain with this token and was not before; often empty."""
        self._pending.append(token)
        text = self._decode(self._pending)
        if not text.endswith(INCOMPLETE):
            return self._release(text)
        # Bytes that may yet become a character are one sign at the end; what is before it stays as it is.
        piece, self._sent = text[self._sent : -1], len(text) - 1
        return piece

    def end(self) -> str:
        """The rest: bytes that were no character."""
        return self._release(self._decode(self._pending))

    def _release(self, text: str) -> str:
        piece = text[self._sent :]
        self._pending.clear()
        self._sent = 0
        return piece


class WordStream:
    """For decoders that look at the tokens around, to join word pieces and to take spaces away: the last words stay
    back until they are settled."""

    def __init__(self, decode: Decode, prompt_ids: Iterable[int]) -> None:
        self._decode = decode
        self._ids = list(prompt_ids)
        self._sent = decode(self._ids)

    def push(self, token: int) -> str:
        """The text that is certain with this token and was not before; often empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        settled = text
        for _ in range(_UNSETTLED_WORDS):
            settled = settled.rpartition(" ")[0]
        return self._send(settled)

    def end(self) -> str:
        """The rest."""
        return self._send(self._decode(self._ids))

    def _send(self, text: str) -> str:
        # Only the end of the prompt can turn out otherwise: "do n" and then "don't".
        known = len(commonprefix([text, self._sent]))  # noqa: RUF071 - of characters is what is meant
        if known < len(text):
            self._sent = text
        return text[known:]
