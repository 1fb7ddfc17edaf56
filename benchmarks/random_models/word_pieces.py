"""Makes a WordPiece tokenizer of any size, as BLIP's: BERT's uncased one and two tokens more at its end."""

import random
import string
from typing import Any

_SEED = 0
PADDING, UNKNOWN, CLS, SEP, MASK = 0, 100, 101, 102, 103  # as in bert-base-uncased
NEVER = -1e4  # the bias of a token that is not to be chosen: far below every logit, and a number of float16 too


def start_id(vocab_size: int) -> int:
    """[DEC]; [ENC] follows."""
    return vocab_size - 2


def word_piece_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A `tokenizer.json` with made-up words; at BERT's size it takes as long to load."""
    specials = {"[PAD]": PADDING, "[UNK]": UNKNOWN, "[CLS]": CLS, "[SEP]": SEP, "[MASK]": MASK}
    specials |= {"[DEC]": start_id(vocab_size), "[ENC]": start_id(vocab_size) + 1}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, index) for token, index in specials.items()],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _around_a_text(),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": _vocabulary(vocab_size, specials),
        },
    }


def _vocabulary(size: int, specials: dict[str, int]) -> dict[str, int]:
    taken = {index: token for token, index in specials.items()}
    characters = string.ascii_lowercase + string.digits
    pieces = [*string.punctuation, *characters, *(f"##{character}" for character in characters)]
    chooser = random.Random(_SEED)
    known = {*pieces, *specials}
    while len(pieces) < size:
        word = "".join(chooser.choices(string.ascii_lowercase, k=chooser.randint(2, 8)))
        piece = f"##{word}" if chooser.random() < 0.2 else word
        if piece not in known:
            known.add(piece)
            pieces.append(piece)
    following = iter(pieces)
    unused = (f"[unused{index}]" for index in range(UNKNOWN))
    words = (taken.get(index) or (next(unused) if index < UNKNOWN else next(following)) for index in range(size))
    return {word: index for index, word in enumerate(words)}


def _added(token: str, index: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": True}


def _around_a_text() -> dict[str, Any]:
    def special(token: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": 0}}

    text, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    ids = {"[CLS]": CLS, "[SEP]": SEP}
    return {
        "type": "TemplateProcessing",
        "single": [special("[CLS]"), text, special("[SEP]")],
        "pair": [special("[CLS]"), text, special("[SEP]"), second, special("[SEP]")],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in ids.items()},
    }
