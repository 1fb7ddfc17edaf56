"""The tokenizer against transformers' AutoTokenizer, from the files that checkpoints have."""

import codecs
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from support.checkpoints.permissions import denied
from support.checkpoints.tokenizer_cases import assert_equal_to_transformers, byte_level_bpe, write
from tokenizers import Regex, decoders, pre_tokenizers

from snapcap.models.config import ConfigError
from snapcap.models.errors import TokenizerFailed
from snapcap.models.processing import tokenizer as tokenizer_module
from snapcap.models.processing.tokenizer import Tokenizer

TEXTS = [
    "a red circle is above two blue squares .",
    "a man's hat doesn't fit , they've said ; we're sure !",
    "naïve café 日本 🙂 and a tab\tand\nlines",
    "the dog is 42 years old ? it 's 7",
]
END = "<|endoftext|>"


def fast_folder(folder: Path, special: list[str] | None = None, **config: Any) -> Path:
    byte_level_bpe(TEXTS, [END] if special is None else special).save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "GPT2TokenizerFast", "eos_token": END, "bos_token": END, "unk_token": END}
    write(folder, "tokenizer_config.json", fields | config)
    return folder


def slow_folder(folder: Path, **config: Any) -> Path:
    """vocab.json with the end token last, as GPT-2's, and merges.txt."""
    backend = byte_level_bpe(TEXTS)
    backend.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    write(folder, "vocab.json", vocab | {END: len(vocab)})
    write(folder, "tokenizer_config.json", config)
    return folder


def test_a_fast_tokenizer_is_equal(tmp_path: Path) -> None:
    assert_equal_to_transformers(fast_folder(tmp_path), TEXTS)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([0, *tokenizer.encode(" a red circle "), 0]) == "a red circle"


def test_a_byte_order_mark_before_a_fast_tokenizer(tmp_path: Path) -> None:
    file = fast_folder(tmp_path) / "tokenizer.json"
    wanted = Tokenizer.from_folder(tmp_path).encode("a red circle")
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert Tokenizer.from_folder(tmp_path).encode("a red circle") == wanted


def test_what_transformers_saves_is_equal(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source, saved = tmp_path / "source", tmp_path / "saved"
    source.mkdir()
    original = AutoTokenizer.from_pretrained(fast_folder(source))
    original.add_special_tokens({"pad_token": "<pad>"})
    original.save_pretrained(saved)
    assert_equal_to_transformers(saved, TEXTS)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {"tokenizer_class": "GPT2Tokenizer", "pad_token": "<pad>"},
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": {"__type": "AddedToken", "content": END}},
    ],
    ids=json.dumps,
)
def test_the_slow_files_of_gpt2_are_equal(tmp_path: Path, config: dict[str, Any]) -> None:
    # Without a class transformers asks config.json.
    write(tmp_path, "config.json", {"model_type": "gpt2"})
    assert_equal_to_transformers(slow_folder(tmp_path, **config), TEXTS)


def test_the_end_token_of_slow_files_is_skipped(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(slow_folder(tmp_path))
    ids = tokenizer.encode("a dog")
    assert tokenizer.decode([*ids, tokenizer.vocab_size - 1]) == "a dog"


def test_special_tokens_that_only_the_config_names_are_skipped(tmp_path: Path) -> None:
    """tokenizer.json knows the text of the tokens but calls none of them special."""
    folder = fast_folder(tmp_path, special=[])
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab |= {END: len(vocab), "<pad>": len(vocab) + 1}
    write(folder, "tokenizer.json", tokens)
    write(folder, "special_tokens_map.json", {"pad_token": {"content": "<pad>", "normalized": False}})
    decoder = {str(vocab[END]): {"content": END, "special": True, "normalized": False}}
    write(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "eos_token": END,
            "added_tokens_decoder": decoder,
            "pad_token": "<pad>",
        },
    )
    assert_equal_to_transformers(folder, TEXTS)
    assert Tokenizer.from_folder(folder).decode([vocab[END], vocab["a"], vocab["<pad>"]]) == "a"


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_spaces_are_cleaned_up_as_transformers_does(tmp_path: Path, flag: bool, forced: bool) -> None:
    name = "clean_up_tokenization_spaces"
    config: dict[str, Any] = {name: flag, f"{name}_for_bpe_even_though_it_will_corrupt_output": flag and forced}
    assert_equal_to_transformers(fast_folder(tmp_path, **config), TEXTS)
    tokenizer = Tokenizer.from_folder(tmp_path)
    expected = "so." if flag and forced else "so ."
    assert tokenizer.decode(tokenizer.encode("so .")) == expected


def test_spaces_of_another_model_are_cleaned_up(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "a": 1, "dog": 2, ".": 3, "'s": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    write(tmp_path, "tokenizer_config.json", config | {"clean_up_tokenization_spaces": True})
    assert_equal_to_transformers(tmp_path, TEXTS)
    assert Tokenizer.from_folder(tmp_path).decode([1, 2, 4, 3]) == "a dog's."


def test_a_prompt_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    backend = byte_level_bpe([END])
    whole = backend.encode(TEXTS[0]).ids
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode(TEXTS[0]) == whole


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "there is no tokenizer.json; convert the checkpoint with `snapcap import SRC DST`"),
        ({"spiece.model": "x"}, "`snapcap import SRC DST`"),
        (
            {"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"tokenizer_class": "CLIPTokenizer"}'},
            "tokenizer_class = 'CLIPTokenizer'.*`snapcap import SRC DST`",
        ),
        ({"tokenizer.json": '{"version": "1.0"'}, "tokenizer.json'.*cannot be read"),
        ({"vocab.json": "[]", "merges.txt": ""}, "vocab.json and merges.txt'.*cannot be read"),
        ({"tokenizer_config.json": "["}, "tokenizer_config.json.*not valid JSON"),
        ({"tokenizer.json": POINTER}, "tokenizer.json cannot be read: it is a Git LFS pointer"),
        ({"vocab.json": "{}", "merges.txt": POINTER}, "merges.txt cannot be read: it is a Git LFS pointer"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_read_is_one_line_with_a_remedy(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


class PanicException(BaseException):
    """As that of tokenizers' own code, which no `except Exception` sees."""


def test_a_panic_of_the_library_is_a_file_that_cannot_be_read(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(content: bytes) -> tokenizers.Tokenizer:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(
        tokenizer_module, "tokenizers", SimpleNamespace(Tokenizer=SimpleNamespace(from_buffer=panic))
    )
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*index out of bounds"):
        Tokenizer.from_folder(demo_folder)


@pytest.mark.parametrize("number", ["x", None, [1]], ids=str)
def test_added_tokens_of_another_form_are_named(tmp_path: Path, number: Any) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "<|endoftext|>": 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": number}))
    with pytest.raises(ConfigError, match=r"added_tokens\.json"):
        Tokenizer.from_folder(tmp_path)


def test_special_tokens_of_another_form_are_named(demo_folder: Path, tmp_path: Path) -> None:
    shutil.copy(demo_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"x": 5}}))
    with pytest.raises(ConfigError, match="tokenizer_config"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (decoders.Sequence([decoders.Replace("a", "a" * 10)] * 7), "it makes texts up to 10000000 times as long"),
        (decoders.Replace(Regex("(x+x+)+y"), ""), "a Replace with a regular expression is not supported"),
        (decoders.Sequence([decoders.Replace("", "a")] * 30), "a Replace of an empty text is not supported"),
        (decoders.Sequence([decoders.BPEDecoder("")] * 30), "a BPEDecoder of an empty text is not supported"),
        (decoders.CTC("<pad>", ""), "a CTC of an empty text is not supported"),
        (decoders.Sequence([decoders.Strip("x", 0, 0)] * 40), "41 steps are too many; at most 32 are allowed"),
    ],
    ids=["grows", "searches", "doubles", "doubles too", "and so", "many steps"],
)
def test_a_decoder_whose_work_is_not_bounded_is_refused(
    tmp_path: Path, decoder: decoders.Decoder, expected: str
) -> None:
    backend = byte_level_bpe([END])
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=expected):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_as_llamas_is_read(tmp_path: Path) -> None:
    backend = byte_level_bpe([END])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).decode(backend.encode("ab").ids) == "ab"


def test_a_panic_at_a_text_is_an_error_of_that_text(tmp_path: Path) -> None:
    backend = byte_level_bpe([END])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer = Tokenizer(backend, clean_up=False)
    with pytest.raises(TokenizerFailed, match="be text that the model's tokenizer can read") as caught:
        tokenizer.encode("x" * 40)
    assert "retry-limit-in-match over" in caught.value.cause
    assert tokenizer.encode("y")


FAST = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.mark.parametrize("name", [*FAST, "vocab.json", "merges.txt", "added_tokens.json", "vocab.txt"])
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, name: str) -> None:
    folder = fast_folder(tmp_path) if name in FAST else slow_folder(tmp_path)
    if name == "vocab.txt":
        write(folder, "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})
        (folder / name).write_text("[UNK]\nred\n")
    elif not (folder / name).exists():
        write(folder, name, {})
    Tokenizer.from_folder(folder)
    with denied(folder / name), pytest.raises(ConfigError) as caught:
        Tokenizer.from_folder(folder)
    assert str(caught.value) == f"{folder / name} cannot be read: Permission denied"
