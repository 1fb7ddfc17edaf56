"""Token ids <-> text, from a checkpoint's tokenizer files, without transformers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from models.config_fields import ConfigError, read_json
from models.text_stream import ByteLevelStream, WordStream

_GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
_REMEDY = "convert the checkpoint with `snapcap import SRC DST`"

# transformers' clean-up of spaces, in its order
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


class Tokenizer:
    """Encodes prompts and decodes captions; safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, clean_up: bool) -> None:
        self._backend = backend
        self._clean_up = clean_up

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read ``tokenizer.json``, or GPT-2's ``vocab.json`` and ``merges.txt``.

        Raises:
            ConfigError: the folder has neither, or they cannot be used; the message says what to do.
        """
        config = _json_or_empty(folder / "tokenizer_config.json")
        special_map = _json_or_empty(folder / "special_tokens_map.json")
        backend = _backend(folder, config)
        if not (folder / "tokenizer.json").is_file():
            config = dict.fromkeys(_SPECIAL[:3], "<|endoftext|>") | config
            added = _json_or_empty(folder / "added_tokens.json")
            backend.add_tokens(sorted(added, key=lambda token: int(added[token])))
        _mark_special(backend, config, special_map)
        return cls(backend, _cleans_up(backend, config))

    @property
    def vocab_size(self) -> int:
        """The number of tokens, special and added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the special tokens a tokenizer may put around it."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids as transformers' ``decode(ids, skip_special_tokens=True)`` gives it, then stripped."""
        return self._text(list(ids)).strip()

    def stream(self, prompt_ids: Iterable[int] = ()) -> ByteLevelStream | WordStream:
        """The text of the tokens that follow a prompt, as they come; together, and stripped, what `decode` adds to
        the prompt's text."""
        if isinstance(self._backend.decoder, decoders.ByteLevel) and not self._clean_up:
            return ByteLevelStream(self._text)
        return WordStream(self._text, prompt_ids)

    def save(self, path: Path) -> None:
        """Write a ``tokenizer.json``, from which the same tokenizer can be read."""
        self._backend.save(str(path))

    def _text(self, ids: list[int]) -> str:
        text = str(self._backend.decode(ids, skip_special_tokens=True))
        if self._clean_up:
            for spaced, clean in _CLEAN_UP:
                text = text.replace(spaced, clean)
        return text


def _json_or_empty(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _backend(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    fast, vocab, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    name = config.get("tokenizer_class")
    if not fast.is_file() and not (vocab.is_file() and merges.is_file()):
        raise ConfigError("tokenizer", name or folder.name, f"there is no tokenizer.json; {_REMEDY}")
    if not fast.is_file() and name not in _GPT2_CLASSES:
        raise ConfigError("tokenizer_class", name, f"without a tokenizer.json only GPT-2's is read; {_REMEDY}")
    try:
        if fast.is_file():
            backend = tokenizers.Tokenizer.from_file(str(fast))
            # A length or padding that training left in the file must not cut or pad a prompt.
            backend.no_truncation()
            backend.no_padding()
            return backend
        return _gpt2(vocab, merges, bool(config.get("add_prefix_space", False)))
    except Exception as error:  # the library raises bare Exception
        file = fast.name if fast.is_file() else f"{vocab.name} and {merges.name}"
        raise ConfigError("tokenizer", file, f"cannot be read ({error})") from None


def _gpt2(vocab: Path, merges: Path, add_prefix_space: bool) -> tokenizers.Tokenizer:
    """Byte-level BPE, which is all that GPT-2's slow tokenizer is."""
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _mark_special(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_map: Mapping[str, Any]) -> None:
    """Register the tokens that only the two JSON files beside the tokenizer call special.

    The order is transformers': tokens with ids first, by id, then by role.
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
        # By role only a name is given: its flags (strip, normalise) stay where the tokenizer has it already.
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


def _cleans_up(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> bool:
    # transformers 5 leaves BPE output alone even where the config asks for a clean-up: it would eat real spaces.
    if type(backend.model).__name__ == "BPE":
        return bool(config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
    return bool(config.get("clean_up_tokenization_spaces", False))
