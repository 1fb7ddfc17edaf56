"""Makes small tokenizers, and compares ours with transformers' on their files."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from snapcap.models.processing.tokenizer import Tokenizer


def write(folder: Path, name: str, content: Any) -> None:
    """A file of JSON."""
    (folder / name).write_text(json.dumps(content))


def assert_equal_to_transformers(folder: Path, texts: Sequence[str], above: int = 0) -> None:
    """Texts give the same ids and, as random ids and every single one do, the same text back.

    Args:
        above: how many ids beyond the vocabulary must be read alike.
    """
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    rng = random.Random(1)
    sequences = [ours.encode(text) for text in texts]
    for text, ids in zip(texts, sequences, strict=True):
        assert ids == theirs.encode(text, add_special_tokens=False)
    sequences += [[rng.randrange(ours.vocab_size) for _ in range(12)] for _ in range(100)]
    sequences += [[], *([index] for index in range(ours.vocab_size + above))]
    for ids in sequences:
        assert ours.decode(ids) == str(theirs.decode(ids, skip_special_tokens=True)).strip()


def byte_level_bpe(texts: Sequence[str], special: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Makes a tokenizer of 400 tokens, of the kind that GPT-2 and RoBERTa have."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*texts] * 3, trainer)
    return backend
