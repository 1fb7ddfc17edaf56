"""Reads a checkpoint's tokenizer files: `tokenizer.json`, or the slow tokenizers' files of three families."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from snapcap.models.errors import TokenizerFailed
from snapcap.models.fields import ConfigError, FileError, is_there, json_or_empty, read_bytes

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
_ROBERTA_FAMILIES = ("roberta", "trocr", "florence2")
T = TypeVar("T")


def read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Returns the tokenizer with its special tokens marked, and the content of its ``tokenizer_config.json``.

    Raises:
        ConfigError: there are no files that can be used. The message says what to do.
    """
    config = json_or_empty(folder / "tokenizer_config.json")
    special_map = json_or_empty(folder / "special_tokens_map.json")
    fast = folder / "tokenizer.json"
    if is_there(fast):
        content = read_bytes(fast)
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
    """Describes an error of the library, which raises Exception, or a BaseException if its Rust code panics.

    Raises:
        BaseException: the error itself, if it is the interpreter's, such as KeyboardInterrupt.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return str(error)[:300] or type(error).__name__


def encoded(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
    """Returns the tokens of a text. With ``add_special_tokens``, includes those that a tokenizer may put around
    it.

    Raises:
        TokenizerFailed: the library fails on this text, for example because a pattern takes too many steps.
    """
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except BaseException as error:
        raise TokenizerFailed(failure(error)) from None


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the text of each special token that the tokenizer's JSON files name, by its role, such as
    ``bos_token``.

    Raises:
        ConfigError: a file is not a JSON object.
    """
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
    """Refuses a decoder whose time does not grow with the number of tokens alone: captions are decoded in the
    event loop.

    Raises:
        ConfigError: the decoder makes texts much longer, or searches them for a pattern.
    """
    if backend.decoder is None:
        return
    growth, steps = 1.0, [json.loads(backend.decoder.__getstate__())]
    while steps:
        step = steps.pop()
        steps += step.get("decoders") or []
        if step.get("type") != "Replace":
            continue
        pattern = step["pattern"].get("String")
        if pattern is None:
            raise ConfigError("tokenizer", "decoder", "a Replace with a regular expression is not supported")
        growth *= max(1.0, len(step["content"].encode()) / max(1, len(pattern.encode())))
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
        read_bytes(file, 1)  # the library does not say which of the two files cannot be read
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
