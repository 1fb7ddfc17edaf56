"""The tokenizers of BLIP, BERT, RoBERTa and TrOCR checkpoints against transformers, fast files and slow."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.tokenizer_cases import assert_equal_to_transformers, byte_level_bpe, write
from support.checkpoints.word_pieces import word_piece_vocabulary

from snapcap.models.config import ConfigError
from snapcap.models.processing.tokenizer import Tokenizer, read_backend

TEXTS = [
    "a photography of",
    "A red circle is above two blue squares .",
    "a man's hat doesn't fit , they've said ; we're sure !",
    "naïve café 日本 🙂 and a tab\tand\nlines [MASK] <mask> </s>",
    "the dog is 42 years old ? it 's 7",
    "",
]
ABOVE = 2  # [DEC] and [ENC] are tokens of BLIP's decoder that its tokenizer does not know


def bert_folder(folder: Path, **config: Any) -> Path:
    """vocab.txt, as BLIP's and BERT's checkpoints of old have it."""
    (folder / "vocab.txt").write_text(word_piece_vocabulary(), encoding="utf-8")
    write(folder, "tokenizer_config.json", config)
    write(folder, "config.json", {"model_type": "blip"})  # transformers asks it where no class is named
    return folder


def roberta_folder(folder: Path, **config: Any) -> Path:
    """vocab.json and merges.txt, as TrOCR's checkpoints have them."""
    backend = byte_level_bpe(TEXTS, ["<s>", "<pad>", "</s>", "<unk>"])
    backend.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    write(folder, "vocab.json", vocab | {"<mask>": len(vocab)})
    write(folder, "tokenizer_config.json", config)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"tokenizer_class": "BertTokenizerFast", "strip_accents": False, "tokenize_chinese_chars": False},
        {"tokenizer_class": "BertTokenizer", "clean_up_tokenization_spaces": True, "model_max_length": 512},
        {"tokenizer_class": "BertTokenizer", "unk_token": {"__type": "AddedToken", "content": "[unused0]"}},
        {},
    ],
    ids=lambda config: json.dumps(config)[:70],
)
def test_a_word_piece_vocabulary_is_equal(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_equal_to_transformers(bert_folder(tmp_path, **config), TEXTS, ABOVE)


@pytest.mark.parametrize("clean_up", [None, False, True])
def test_what_transformers_saves_of_a_bert_tokenizer_is_equal(tmp_path: Path, clean_up: bool | None) -> None:
    from transformers import BertTokenizer

    source, saved = tmp_path / "source", tmp_path / "saved"
    source.mkdir()
    BertTokenizer.from_pretrained(bert_folder(source)).save_pretrained(saved)
    assert not (saved / "vocab.txt").exists()
    if clean_up is not None:
        config = json.loads((saved / "tokenizer_config.json").read_text())
        write(saved, "tokenizer_config.json", config | {"clean_up_tokenization_spaces": clean_up})
    assert_equal_to_transformers(saved, TEXTS, ABOVE)


def test_a_prompt_is_encoded_as_git_generates_from_it(tmp_path: Path) -> None:
    """[CLS], which is the start token, and the text's tokens: what its documentation gives to `generate`."""
    from transformers import BertTokenizer, GitProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder = bert_folder(tmp_path, tokenizer_class="BertTokenizer")
    processor = GitProcessor(CLIPImageProcessorPil(), BertTokenizer.from_pretrained(folder))
    theirs = processor(text="A photography of", add_special_tokens=False).input_ids
    assert Tokenizer.from_folder(folder).encode("A photography of") == theirs


def test_a_prompt_is_encoded_as_blip_generates_from_it(tmp_path: Path) -> None:
    """BlipProcessor puts [CLS] before and [SEP] after it; `generate` replaces the first and drops the last."""
    from transformers import BertTokenizer

    folder = bert_folder(tmp_path, tokenizer_class="BertTokenizer")
    whole = BertTokenizer.from_pretrained(folder)("A photography of").input_ids
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("A photography of") == whole[1:-1]
    assert tokenizer.decode([*whole[1:-1], 12, 9999]) == "a photography of is"


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "RobertaTokenizer"},
        {"tokenizer_class": "RobertaTokenizerFast", "add_prefix_space": True},
        {
            "tokenizer_class": "RobertaTokenizer",
            "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True},
        },
    ],
    ids=lambda config: json.dumps(config)[:70],
)
def test_the_slow_files_of_roberta_are_equal(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_equal_to_transformers(roberta_folder(tmp_path, **config), TEXTS, ABOVE)


@pytest.mark.parametrize("make", [bert_folder, roberta_folder])
def test_the_text_does_not_depend_on_what_was_decoded_before(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Single bytes, left-out tokens and pieces of words in every place, decoded again and again."""
    tokenizer = Tokenizer.from_folder(make(tmp_path))
    backend, _ = read_backend(tmp_path)
    luck = random.Random(0)
    for length in [0, 1, 2, 3, 5, 9] * 300:
        ids = luck.choices(range(tokenizer.vocab_size + ABOVE), k=length)
        ids += luck.choices(range(5), k=luck.choice((0, 0, 1)))
        luck.shuffle(ids)
        expected = backend.decode(ids, skip_special_tokens=True).strip()
        assert [tokenizer.decode(ids), tokenizer.decode(ids)] == [expected] * 2


@pytest.mark.parametrize("family", ["roberta", "trocr"])
def test_without_a_class_the_decoder_says_whose_files_they_are(tmp_path: Path, family: str) -> None:
    folder = roberta_folder(tmp_path)
    write(folder, "config.json", {"model_type": "vision-encoder-decoder", "decoder": {"model_type": family}})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode([0, *tokenizer.encode("a dog"), 2, 1]) == "a dog"
    write(folder, "config.json", {"model_type": "florence2"})  # whose text part is BART
    assert Tokenizer.from_folder(folder).vocab_size == tokenizer.vocab_size


def test_a_class_whose_files_are_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_class = 'BertTokenizer'.*`snapcap import SRC DST`"):
        Tokenizer.from_folder(roberta_folder(tmp_path, tokenizer_class="BertTokenizer"))
