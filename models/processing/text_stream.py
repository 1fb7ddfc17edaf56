"""Streams the text of tokens as they are generated, in pieces that are never taken back."""

from collections.abc import Callable, Iterable
from os.path import commonprefix

# A byte-level decoder returns this character for bytes that are not, or not yet, a character.
INCOMPLETE = "\ufffd"
# transformers' clean-up joins at most three words ("do n ' t"), and the last of them may not be generated yet.
_UNSETTLED_WORDS = 2

Decode = Callable[[list[int]], str]


class ByteLevelStream:
    """Streams text of byte-level BPE, which is the tokens' texts in sequence. A piece always ends with a whole
    character."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pending: list[int] = []
        self._sent = 0  # number of characters of the pending tokens that were sent

    def push(self, token: int) -> str:
        """Returns the text that becomes certain with this token; often empty."""
        self._pending.append(token)
        text = self._decode(self._pending)
        if not text.endswith(INCOMPLETE):
            return self._release(text)
        # Incomplete bytes are one replacement character at the end. The text before it never changes.
        piece, self._sent = text[self._sent : -1], len(text) - 1
        return piece

    def end(self) -> str:
        """Returns the rest: bytes that are no character."""
        return self._release(self._decode(self._pending))

    def _release(self, text: str) -> str:
        piece = text[self._sent :]
        self._pending.clear()
        self._sent = 0
        return piece


class WordStream:
    """Streams text of decoders whose text depends on neighbouring tokens, because they join word pieces or remove
    spaces.

    The last words are held back until they cannot change any more.
    """

    def __init__(self, decode: Decode, prompt_ids: Iterable[int]) -> None:
        self._decode = decode
        self._ids = list(prompt_ids)
        self._sent = decode(self._ids)

    def push(self, token: int) -> str:
        """Returns the text that becomes certain with this token; often empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        settled = text
        for _ in range(_UNSETTLED_WORDS):
            settled = settled.rpartition(" ")[0]
        return self._send(settled)

    def end(self) -> str:
        """Returns the rest of the text."""
        return self._send(self._decode(self._ids))

    def _send(self, text: str) -> str:
        # Only the end of the prompt can still change: "do n" becomes "don't".
        known = len(commonprefix([text, self._sent]))  # noqa: RUF071 - characters are meant, not paths
        if known < len(text):
            self._sent = text
        return text[known:]
