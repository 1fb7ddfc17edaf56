"""Converts between token ids and text by a checkpoint's tokenizer files, without transformers.

The files are `tokenizer.json`, or the slow tokenizers' files of three families. A caption's text can be streamed as
its tokens are generated, in pieces that are never taken back.
"""

import codecs
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from snapcap.models.errors import TokenizerFailed
from snapcap.models.fields import POINTER, ConfigError, FileError, is_there, json_or_empty, read_bytes
from snapcap.models.text import ChatIds, Dialogue, PromptIds

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
    """Encodes prompts and decodes captions. Safe to use from several threads.

    takes_instructions: a prompt is an instruction. Otherwise it is the beginning of the caption.
    takes_conversations: the chat template renders a conversation message by message.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        clean_up: bool,
        chat: ChatIds | None = None,
        omitted: frozenset[int] | None = None,
    ) -> None:
        """``chat`` holds the chat template's token ids, if the model has a template. ``omitted``: the only special
        tokens that texts omit. None omits all special tokens."""
        if chat is not None:
            from snapcap.models.processing.chat import ChatEncoder  # noqa: PLC0415 - only chat models need it
        self._chat = None if chat is None else ChatEncoder(backend, chat)
        self.takes_instructions = chat is not None
        self.takes_conversations = chat is not None and bool(chat.frames)
        self._backend = backend
        self._clean_up = clean_up
        self._omitted = omitted
        joins = isinstance(backend.decoder, decoders.ByteLevel | decoders.WordPiece)
        self._pieces = _Pieces(backend, omitted is None) if joins else None

    @classmethod
    def from_folder(cls, folder: Path, chat: ChatIds | None = None) -> "Tokenizer":
        """Reads ``tokenizer.json``, or the slow files of GPT-2, RoBERTa or BERT. Raises ConfigError if the folder
        has neither, or they cannot be used."""
        backend, config = read_backend(folder)
        return cls(backend, _cleans_up(backend, config), chat)

    def with_marks(self, omitted: frozenset[int]) -> "Tokenizer":
        """Returns the same tokenizer for texts that keep special tokens, except the ids in ``omitted``."""
        return Tokenizer(self._backend, self._clean_up, omitted=omitted)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special and added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def prompt_ids(self, text: str, around: Dialogue = Dialogue(), most_ahead: int | None = None) -> PromptIds:  # noqa: B008 - frozen
        """Returns the ids of a prompt between other texts, which follow a row's start token.

        A model that takes instructions gets a default one if there is no text. The model reads a text before the
        image behind it, if more than ``most_ahead`` tokens would stand before the image.

        Raises:
            PromptError: the model cannot take the texts.
            TokenizerFailed: the tokenizer's library failed on a text.
        """
        if self._chat is not None:
            return self._chat.ids(text, around, most_ahead)
        return PromptIds(tuple(self.encode(text)) if text else ())

    def token(self, number: int) -> str:
        """Returns the text of one token, as in the tokenizer's files; "" for an unknown id."""
        return str(self._backend.id_to_token(number) or "")

    def caption(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> str:
        """Returns the caption of generated tokens, with the prompt if it is the caption's beginning."""
        return self.answer(prompt_ids, tokens).strip()

    def answer(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> str:
        """Returns the text of `caption` with the space around it."""
        return self._text([*self._begun(prompt_ids), *tokens])

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
        if self._omitted:
            ids = [each for each in ids if each not in self._omitted]
        text = None if self._pieces is None else self._pieces.text(ids)
        if text is None:
            text = _decoded(self._backend, ids, self._omitted is None)
        if self._clean_up and _MAY_NEED_CLEAN_UP(text):
            for spaced, clean in _CLEAN_UP:
                text = text.replace(spaced, clean)
        return text


def _decoded(backend: tokenizers.Tokenizer, ids: list[int], skip_special: bool = True) -> str:
    """Returns the text of tokens. Raises RuntimeError if the library fails on these tokens."""
    try:
        return str(backend.decode(ids, skip_special_tokens=skip_special))
    except BaseException as error:
        raise RuntimeError(f"the tokenizer failed to make text of a caption's tokens ({failure(error)})") from None


class _Pieces(dict[int, str]):
    """The text of each token that was seen, where it follows another token. Empty if decoding omits the token.

    The table serves decoders whose text of a token depends on nothing else: those of word pieces, and byte-level
    ones except for incomplete characters. Captions consist of a few hundred different tokens, and looking them up
    takes the event loop less time than decoding them.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skip_special: bool) -> None:
        super().__init__()
        self._backend = backend
        self._skip_special = skip_special
        self._first: dict[int, str] = {}  # the text of a token that follows no other

    def __missing__(self, token: int) -> str:
        first = self._first[token] = _decoded(self._backend, [token], self._skip_special)
        both = _decoded(self._backend, [token, token], self._skip_special)
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


_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
_REMEDY = "convert the checkpoint with `snapcap import SRC DST`"

# The special tokens of each slow tokenizer, if its files name none.
_DEFAULTS: dict[str, dict[str, str]] = {
    "BertTokenizer": {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    "GPT2Tokenizer": dict.fromkeys(_SPECIAL[:3], "<|endoftext|>"),
    "RobertaTokenizer": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "cls_token": "<s>",
        "mask_token": "<mask>",
    },
}
_MOST_GROWTH = 16  # greatest growth of a decoder's text; a decoder that writes a space for "▁" shortens it
_MOST_STEPS = 32  # greatest number of a decoder's steps, each of which reads the whole text
# Fields of decoders with the text in whose place they put a space. An empty text is between any two characters.
_REPLACED = {"BPEDecoder": "suffix", "CTC": "word_delimiter_token"}
_ROBERTA_FAMILIES = ("roberta", "trocr", "florence2")
T = TypeVar("T")


def read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Returns the tokenizer with its special tokens marked, and the content of its ``tokenizer_config.json``.
    Raises ConfigError if there are no files that can be used."""
    config = json_or_empty(folder / "tokenizer_config.json")
    special_map = json_or_empty(folder / "special_tokens_map.json")
    fast = folder / "tokenizer.json"
    if is_there(fast):
        content = read_bytes(fast).removeprefix(codecs.BOM_UTF8)
        backend = _read(fast.name, lambda: tokenizers.Tokenizer.from_buffer(content))
        # Truncation or padding that training left in the file must not cut or pad a prompt.
        backend.no_truncation()
        backend.no_padding()
        _check_decoder(backend)
    else:
        name = _slow_class(folder, config)
        backend = _bert(folder, config) if name == "BertTokenizer" else _byte_level(folder, config)
        config = _DEFAULTS[name] | config
        added = json_or_empty(folder / "added_tokens.json")
        _read("added_tokens.json", lambda: backend.add_tokens(sorted(added, key=lambda token: int(added[token]))))
    _read("tokenizer_config.json", lambda: _mark_special(backend, config, special_map))
    return backend, config


def failure(error: BaseException) -> str:
    """Describes an error of the library, which raises Exception, or a BaseException if its Rust code panics. Raises
    the error itself if it is the interpreter's, such as KeyboardInterrupt."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return str(error)[:300] or type(error).__name__


def encoded(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
    """Returns the tokens of a text. With ``add_special_tokens``, includes those that a tokenizer may put around it.
    Raises TokenizerFailed if the library fails on this text, for example because a pattern takes too many steps."""
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except BaseException as error:
        raise TokenizerFailed(failure(error)) from None


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the text of each special token that the tokenizer's JSON files name, by its role, such as
    ``bos_token``. Raises ConfigError if a file is not a JSON object."""
    tokens: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        config = json_or_empty(folder / file)
        for role in _SPECIAL:
            token = config.get(role)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                tokens[role] = text
    return tokens


def _check_decoder(backend: tokenizers.Tokenizer) -> None:
    """Refuses a decoder whose time does not grow with the number of tokens alone: captions are decoded in the event
    loop. Raises ConfigError if the decoder makes texts much longer, or searches them for a pattern."""
    if backend.decoder is None:
        return
    growth, number, steps = 1.0, 0, [json.loads(backend.decoder.__getstate__())]
    while steps:
        number, step = number + 1, steps.pop()
        steps += step.get("decoders") or []
        kind, content = step.get("type"), " "  # the two others put a space in the place of a text
        if kind == "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            if pattern is None:
                raise ConfigError("tokenizer", "decoder", "a Replace with a regular expression is not supported")
        elif kind in _REPLACED:
            pattern = step[_REPLACED[kind]]
        else:
            continue
        if not pattern:
            raise ConfigError("tokenizer", "decoder", f"a {kind} of an empty text is not supported")
        growth *= max(1.0, len(content.encode()) / len(pattern.encode()))
    if number > _MOST_STEPS:
        raise ConfigError("tokenizer", "decoder", f"{number} steps are too many; at most {_MOST_STEPS} are allowed")
    if growth > _MOST_GROWTH:
        raise ConfigError("tokenizer", "decoder", f"it makes texts up to {growth:.0f} times as long")


def _slow_class(folder: Path, config: Mapping[str, Any]) -> str:
    """Returns the class of the slow tokenizer, which the files name, or else the model's family implies."""
    named = config.get("tokenizer_class")
    word_pieces = is_there(folder / "vocab.txt")
    byte_pairs = is_there(folder / "vocab.json") and is_there(folder / "merges.txt")
    if not word_pieces and not byte_pairs:
        raise ConfigError("tokenizer", named or folder.name, f"there is no tokenizer.json; {_REMEDY}")
    if named is not None:
        name = str(named).removesuffix("Fast")
    elif word_pieces:
        name = "BertTokenizer"
    else:
        model = json_or_empty(folder / "config.json")
        decoder = model.get("decoder", model)
        family = decoder.get("model_type") if isinstance(decoder, dict) else None
        name = "RobertaTokenizer" if family in _ROBERTA_FAMILIES else "GPT2Tokenizer"
    if name not in _DEFAULTS or not (word_pieces if name == "BertTokenizer" else byte_pairs):
        known = "GPT-2's, RoBERTa's and BERT's"
        raise ConfigError("tokenizer_class", named, f"without a tokenizer.json only {known} are read; {_REMEDY}")
    return name


def _byte_level(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Returns the tokenizer of byte-level BPE files, which is all that GPT-2's and RoBERTa's slow tokenizers
    are."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    for file in (vocab, merges):
        read_bytes(file, len(POINTER))  # the library does not say which of the two files cannot be read
    model = _read(f"{vocab.name} and {merges.name}", lambda: models.BPE.from_file(str(vocab), str(merges)))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    return backend


def _bert(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Returns a WordPiece tokenizer, from a vocabulary of one token a line."""
    file = folder / "vocab.txt"
    unknown = config.get("unk_token") or _DEFAULTS["BertTokenizer"]["unk_token"]

    def model() -> models.WordPiece:
        lines = io.StringIO(read_bytes(file).decode(), newline=None)  # reads line ends like a text file
        vocab = {token.rstrip("\n"): index for index, token in enumerate(lines)}
        return models.WordPiece(vocab, unk_token=unknown["content"] if isinstance(unknown, dict) else unknown)

    backend = tokenizers.Tokenizer(_read(file.name, model))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _read(files: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except FileError:
        raise
    except BaseException as error:
        raise ConfigError("tokenizer", files, f"cannot be read ({failure(error)})") from None


def _mark_special(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_map: Mapping[str, Any]) -> None:
    """Marks tokens as special that only the two JSON files beside the tokenizer call special.

    The order is transformers': tokens with ids first, by id, and then tokens by role.
    """
    numbered = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    for _, token in numbered:
        _add(backend, token, bool(token.get("special")))
    for source in (config, special_map):
        for role in _SPECIAL:
            if source.get(role):
                _add(backend, source[role], True)
        for role in _SPECIAL_LISTS:
            tokens = source.get(role) or []
            for token in tokens.values() if isinstance(tokens, dict) else tokens:
                _add(backend, token, True)


def _add(backend: tokenizers.Tokenizer, token: str | Mapping[str, Any], special: bool) -> None:
    if isinstance(token, str):
        # A role gives only a token's text. Flags that the tokenizer has for the token (strip, normalise) are kept.
        known = {added.content: added for added in backend.get_added_tokens_decoder().values()}
        if token in known and known[token].special:
            return
        token = {"content": token}
    flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word")}
    normalized = bool(token.get("normalized", not special))
    added = AddedToken(token["content"], normalized=normalized, special=special, **flags)
    if special:
        backend.add_special_tokens([added])
    else:
        backend.add_tokens([added])
