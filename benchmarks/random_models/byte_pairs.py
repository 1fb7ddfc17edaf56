"""Makes a byte-level BPE tokenizer of any size, as GPT-2's."""

import random
from itertools import accumulate, pairwise
from typing import Any

_SEED = 0


def byte_pair_tokenizer(vocab_size: int, *words: str) -> dict[str, Any]:
    """A `tokenizer.json` with made-up merges; at GPT-2's size it takes as long to load. ``words`` are a token each,
    with U+0120 for a space."""
    alphabet = _byte_alphabet()
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[str] = []
    for word in words:
        for left, joined in pairwise(accumulate(word)):
            if joined not in vocab:
                vocab[joined] = len(vocab)
                merges.append(f"{left} {joined[-1]}")
    letters = [symbol for symbol in alphabet if symbol.isascii() and symbol.isalpha()]
    pieces = ["\u0120", *letters]  # U+0120 stands for a space
    chooser = random.Random(_SEED)
    while len(vocab) < vocab_size - 1:
        left, right = chooser.choice(pieces), chooser.choice(letters if chooser.random() < 0.7 else pieces)
        joined = left + right
        if joined in vocab or len(joined) > 10 or "\u0120" in joined[1:]:
            continue
        vocab[joined] = len(vocab)
        pieces.append(joined)
        merges.append(f"{left} {right}")
    end = {"id": vocab_size - 1, "content": "<|endoftext|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    vocab["<|endoftext|>"] = vocab_size - 1
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "fuse_unk": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {**model, "end_of_word_suffix": "", "byte_fallback": False, "vocab": vocab, "merges": merges},
    }


def _byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary: printable ones for themselves, the others from
    U+0100 on (`bytes_to_unicode` of its reference code)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in sorted(printable)] + [chr(256 + index) for index in range(len(moved))]
