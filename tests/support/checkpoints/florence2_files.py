"""Writes a small random Florence-2 with all the files that its checkpoints have on the hub."""

import json
from pathlib import Path
from typing import Any

from support.checkpoints import random_captioners

SENTENCES = (
    "What does the image describe?",
    "Describe in detail what is shown in the image.",
    "Describe with a paragraph what is shown in the image.",
)
ANSWER_SENTENCES = (
    *SENTENCES,
    "What is the text in the image?",
    "What is the text in the image, with regions?",
    "Locate the objects with category name in the image.",
    "Locate the objects in the image, with their descriptions.",
    "Locate the region proposals in the image.",
    "Locate the phrases in the caption:",
    "Locate a green car in the image with mask",
    "What is the polygon mask of region",
    "What does the region describe?",
    "What text is in the region?",
)
# Special tokens of the answers of other tasks than captions.
MARKS = (*(f"<loc_{number}>" for number in range(1000)), "<sep>", "<poly>", "</poly>", "<od>", "</od>")
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def write_florence2(folder: Path, text: dict[str, Any], seed: int, *, answers: bool = False) -> None:
    """``text``: changes of the text part, with its ``vocab_size``. Two stages of 24×24 and 12×12 tokens.
    ``answers``: the tokenizer knows all tasks and the special tokens of their answers."""
    random_captioners.florence2(_VISION | {"projection_dim": text["d_model"]}, text, seed).save_pretrained(folder)
    (write_answer_tokenizer if answers else write_tokenizer)(folder, text["vocab_size"])
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": False,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "image_seq_length": 145,
        "resample": 3,
        "size": {"height": 96, "width": 96},
        "crop_size": {"height": 96, "width": 96},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


_VISION = {name: random_captioners.DAVIT[name][:2] for name in ("depths", "patch_size", "patch_stride")}
_VISION |= {name: random_captioners.DAVIT[name][:2] for name in ("patch_padding", "patch_prenorm", "embed_dim")}
_VISION |= {name: random_captioners.DAVIT[name][:2] for name in ("num_heads", "num_groups")}


def write_answer_tokenizer(folder: Path, size: int) -> None:
    """The same with the words of all tasks and the special tokens of their answers: more than 1,400 tokens."""
    write_tokenizer(folder, size, ANSWER_SENTENCES, MARKS)


def write_tokenizer(
    folder: Path, size: int, sentences: tuple[str, ...] = SENTENCES, marks: tuple[str, ...] = ()
) -> None:
    """BART's byte-level BPE of ``size`` tokens, which knows the words of the tasks; ``<image>`` is the last."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1 - len(marks),
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences * 4, trainer)
    tokenizer.add_special_tokens([*marks])
    fillers = size - 1 - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f" word{number}" for number in range(fillers)])
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), SPECIALS, strict=True))
    config = {**names, "sep_token": "</s>", "cls_token": "<s>", "extra_special_tokens": {"image_token": "<image>"}}
    config |= {"tokenizer_class": "TokenizersBackend", "image_token": "<image>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def processor_of(folder: Path, answers: dict[str, Any] | None = None) -> Any:
    """transformers' `Florence2Processor` of these files. ``answers``: its `post_processor_config`."""
    from transformers import Florence2Processor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    images = CLIPImageProcessorPil.from_pretrained(folder)
    return Florence2Processor(images, tokenizer, post_processor_config=answers)
