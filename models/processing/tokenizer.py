"""Converts between token ids and text by a checkpoint's tokenizer files, without transformers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders

from snapcap.models.processing.text_stream import INCOMPLETE, ByteLevelStream, WordStream
from snapcap.models.processing.tokenizer_files import encoded, failure, read_backend
from snapcap.models.text import ChatIds

if TYPE_CHECKING:
    from snapcap.models.processing.chat import ChatEncoder

# transformers' clean-up of spaces, in its order.
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_MAY_NEED_CLEAN_UP = re.compile(r" (?:[.?!,']|n't)").search  # the beginning of every such text


class Tokenizer:
    """Encodes prompts and decodes captions. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, clean_up: bool, chat: ChatIds | None = None) -> None:
        """``chat`` holds the chat template's token ids, if the model has a template."""
        self._chat = None if chat is None else _chat_encoder(backend, chat)
        self._backend = backend
        self._clean_up = clean_up
        joins = isinstance(backend.decoder, decoders.ByteLevel | decoders.WordPiece)
        self._pieces = _Pieces(backend) if joins else None

    @classmethod
    def from_folder(cls, folder: Path, chat: ChatIds | None = None) -> "Tokenizer":
        """Reads ``tokenizer.json``, or the slow files of GPT-2, RoBERTa or BERT.

        Raises:
            ConfigError: the folder has neither, or they cannot be used. The message says what to do.
        """
        backend, config = read_backend(folder)
        return cls(backend, _cleans_up(backend, config), chat)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special and added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def takes_instructions(self) -> bool:
        """True if a prompt is an instruction, False if it is the beginning of the caption."""
        return self._chat is not None

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a prompt, which follow a row's start token.

        A model that takes instructions gets a default one if ``text`` is empty.

        Raises:
            PromptError: the model cannot take the text.
            TokenizerFailed: the tokenizer's library failed on the text.
        """
        if self._chat is not None:
            return self._chat.ids(text)
        return tuple(self.encode(text)) if text else ()

    def token(self, number: int) -> str:
        """Returns the text of one token, as in the tokenizer's files; "" for an unknown id."""
        return str(self._backend.id_to_token(number) or "")

    def caption(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> str:
        """Returns the caption of generated tokens, with the prompt if it is the caption's beginning."""
        return self.decode([*self._begun(prompt_ids), *tokens])

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without the special tokens that a tokenizer may put around it. Raises
        TokenizerFailed."""
        return list(encoded(self._backend, text).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the stripped text of ids, which is that of transformers'
        ``decode(ids, skip_special_tokens=True)``."""
        return self._text(list(ids)).strip()

    def stream(self, prompt_ids: Sequence[int] = ()) -> ByteLevelStream | WordStream:
        """Returns a stream of the text of the tokens that follow a prompt.

        All pieces together, stripped, are the text that `caption` adds to a prompt which is the caption's
        beginning.
        """
        if isinstance(self._backend.decoder, decoders.ByteLevel) and not self._clean_up:
            return ByteLevelStream(self._text)
        return WordStream(self._text, self._begun(prompt_ids))

    def save(self, path: Path) -> None:
        """Writes a ``tokenizer.json``, from which the same tokenizer can be read."""
        self._backend.save(str(path))

    def _begun(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """Returns the part of a prompt with which the caption begins: all of it, or nothing of an instruction."""
        return () if self.takes_instructions else prompt_ids

    def _text(self, ids: list[int]) -> str:
        text = None if self._pieces is None else self._pieces.text(ids)
        if text is None:
            text = _decoded(self._backend, ids)
        if self._clean_up and _MAY_NEED_CLEAN_UP(text):
            for spaced, clean in _CLEAN_UP:
                text = text.replace(spaced, clean)
        return text


def _decoded(backend: tokenizers.Tokenizer, ids: list[int]) -> str:
    """Returns the text of tokens.

    Raises:
        RuntimeError: the library fails on these tokens.
    """
    try:
        return str(backend.decode(ids, skip_special_tokens=True))
    except BaseException as error:
        raise RuntimeError(f"the tokenizer failed to make text of a caption's tokens ({failure(error)})") from None


def _chat_encoder(backend: tokenizers.Tokenizer, chat: ChatIds) -> "ChatEncoder":
    from snapcap.models.processing.chat import ChatEncoder  # noqa: PLC0415 - only chat models need it

    return ChatEncoder(backend, chat)


class _Pieces(dict[int, str]):
    """The text of each token that was seen, where it follows another token. Empty if decoding omits the token.

    The table serves decoders whose text of a token depends on nothing else: those of word pieces, and byte-level
    ones except for incomplete characters. Captions consist of a few hundred different tokens, and looking them up
    takes the event loop less time than decoding them.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._first: dict[int, str] = {}  # the text of a token that follows no other

    def __missing__(self, token: int) -> str:
        first = self._first[token] = _decoded(self._backend, [token])
        both = _decoded(self._backend, [token, token])
        self[token] = both.removeprefix(first)
        return self[token]

    def text(self, ids: list[int]) -> str | None:
        """Returns the text of tokens, or None if the decoder is needed."""
        text = "".join(map(self.__getitem__, ids))
        for token in ids:
            first, following = self._first[token], self[token]
            if first or following:  # otherwise decoding omits the token
                text = first + text[len(following) :]
                break
        return None if INCOMPLETE in text else text


def _cleans_up(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> bool:
    # transformers 5 ignores the setting for BPE, because the clean-up would remove real spaces.
    if type(backend.model).__name__ == "BPE":
        return bool(config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
    return bool(config.get("clean_up_tokenization_spaces", False))
