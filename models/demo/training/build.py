"""Makes the untrained checkpoint: the tokenizer, the model, and the folder for transformers and snapcap."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    PreTrainedTokenizerBase,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from snapcap.models.demo.training.scenes import scene_of

IMAGE_SIZE = 96
PATCH_SIZE = 12
HIDDEN_SIZE = 192
HEADS = 6
MAX_LENGTH = 32  # tokens with start and end: the longest caption has 18, the rest is for a prompt
POSITIONS = 48
SPECIAL_TOKENS = ("<|startoftext|>", "<|endoftext|>", "<|pad|>")


def build_tokenizer(captions: int = 5000) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer like GPT-2's on captions of training scenes, until every word is one
    token."""
    start, end, pad = SPECIAL_TOKENS
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than there are merges
        special_tokens=[start, end, pad],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator((scene_of("train", index).caption for index in range(captions)), trainer)
    names = {"bos_token": start, "eos_token": end, "pad_token": pad, "unk_token": end}
    return GPT2Tokenizer(tokenizer_object=learned, model_max_length=MAX_LENGTH, **names)


def build_model(tokenizer: PreTrainedTokenizerBase) -> VisionEncoderDecoderModel:
    """Returns an untrained model in fp32: under 3 million parameters, 0.23 GFLOP to encode an image."""
    ids: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        intermediate_size=640,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    text = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=POSITIONS,
        n_embd=HIDDEN_SIZE,
        n_layer=2,
        n_head=HEADS,
        n_inner=768,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        add_cross_attention=True,
        **ids | {"is_decoder": True},
    )
    model = VisionEncoderDecoderModel(
        encoder=ViTModel(vision, add_pooling_layer=False), decoder=GPT2LMHeadModel(text)
    )
    start = ids.pop("bos_token_id")
    model.config.update({**ids, "decoder_start_token_id": start, "tie_word_embeddings": True})
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        decoder_start_token_id=start, bos_token_id=start, max_length=MAX_LENGTH, **ids
    )
    return model


def save(model: VisionEncoderDecoderModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the checkpoint folder: configuration, weights, tokenizer and image processor."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # some versions make it readable for the owner alone
    tokenizer.save_pretrained(folder)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    ViTImageProcessor(size=size).save_pretrained(folder)
