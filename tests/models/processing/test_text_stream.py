"""Text in pieces: nothing is taken back, no character is broken, and together it is what `decode` gives."""

import random
from os.path import commonprefix
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from snapcap.models.processing.tokenizer import Tokenizer

TEXTS = [
    "a red circle is above two blue squares.",
    "naïve café 日本 🙂👩‍👩‍👧 and a tab\tand\nlines",
    "  spaces   within and after  ",
]


def every_byte_is_a_token(folder: Path) -> Tokenizer:
    """Byte-level BPE without merges: a character of four bytes takes four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def word_pieces(folder: Path, clean_up: bool = True) -> Tokenizer:
    text = "[UNK] a dog do they can is n ' t re s . , ! ##er small hat ve m ?"
    backend = tokenizers.Tokenizer(models.WordPiece({word: at for at, word in enumerate(text.split())}))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"clean_up_tokenization_spaces": {str(clean_up).lower()}}}')
    return Tokenizer.from_folder(folder)


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = tokenizer.stream(prompt or [])
    return [*(stream.push(each) for each in ids), stream.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_no_character_is_broken_over_bytes(tmp_path: Path, text: str) -> None:
    tokenizer = every_byte_is_a_token(tmp_path)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    parts = pieces(tokenizer, ids)
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)  # each character as soon as it is whole


def test_bytes_that_never_become_a_character_come_at_the_end(tmp_path: Path) -> None:
    tokenizer = every_byte_is_a_token(tmp_path)
    ids = tokenizer.encode("a🙂")[:-1]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize("seed", range(20))
def test_bytes_at_random_are_as_in_one_piece_and_not_held_back_for_long(tmp_path: Path, seed: int) -> None:
    tokenizer = every_byte_is_a_token(tmp_path)
    random_ids = [random.Random(seed * 1000 + at).randrange(256) for at in range(200)]
    whole = tokenizer.encode("日本 🙂")
    ids = [*random_ids[:100], *whole, *random_ids[100:]]
    stream = tokenizer.stream()
    sent = ""
    for at, token in enumerate(ids):
        sent += stream.push(token)
        assert tokenizer._text(ids).startswith(sent)
        assert len(tokenizer._text(ids[: at + 1])) - len(sent) <= 1
    assert sent + stream.end() == tokenizer._text(ids)


def test_the_demo_model_s_words_come_one_by_one(demo_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(demo_folder)
    text = "a small blue square left of a large purple star on sand"
    parts = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(parts).strip() == text
    assert sum(map(bool, parts)) == len(tokenizer.encode(text))


def test_what_follows_a_prompt_begins_with_its_space(demo_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(demo_folder)
    ids = tokenizer.encode("a small blue square")
    assert "".join(pieces(tokenizer, ids[2:], ids[:2])) == " blue square"


@pytest.mark.parametrize("prompt", [0, 1, 4])
@pytest.mark.parametrize(
    "text",
    [
        "a small ##er dog .",
        "they do n ' t , they ' re small !",
        "do n ' t do n ' t",
        "a ' dog ' s hat",
        "is n ' t ? they ' ve a hat . a dog ' m",
        "a",
    ],
)
@pytest.mark.parametrize("clean_up", [True, False])
def test_joined_words_are_sent_when_they_are_settled(
    tmp_path: Path, text: str, prompt: int, clean_up: bool
) -> None:
    tokenizer = word_pieces(tmp_path, clean_up)
    ids = [tokenizer._backend.token_to_id(word) for word in text.split()]
    start = tokenizer._text(ids[:prompt])
    parts = pieces(tokenizer, ids[prompt:], ids[:prompt])
    whole = tokenizer._text(ids)
    if not whole.startswith(start):  # the clean-up reaches into the prompt
        start = commonprefix([start, whole])  # noqa: RUF071
    assert start + "".join(parts) == whole
    if len(ids) - prompt > 6:
        assert sum(map(bool, parts)) > 1  # it did not all come at the end
