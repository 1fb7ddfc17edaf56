"""Describes BLIP's tensors and files, as `BlipForConditionalGeneration.save_pretrained` writes them.

BLIP needs an end token, [SEP], and transformers counts what comes before it or [PAD]: the head's bias keeps both
from ever being chosen.
"""

from collections.abc import Iterator
from typing import Any

from snapcap.benchmarks.random_models.tensors import (
    MATRIX_STD,
    POSITION_STD,
    Files,
    Shapes,
    TensorSpec,
    linear,
    norm,
    processor_config,
    vit_config,
)
from snapcap.benchmarks.random_models.word_pieces import NEVER, PADDING, SEP, start_id, word_piece_tokenizer


def tensors(shapes: Shapes) -> Iterator[TensorSpec]:
    yield from _encoder(shapes)
    yield from _decoder(shapes)


def _encoder(shapes: Shapes) -> Iterator[TensorSpec]:
    width, inner, patch = shapes.width, shapes.inner, shapes.patch_size
    yield TensorSpec("vision_model.embeddings.class_embedding", (1, 1, width), MATRIX_STD)
    yield TensorSpec("vision_model.embeddings.position_embedding", (1, shapes.image_tokens, width), MATRIX_STD)
    yield TensorSpec("vision_model.embeddings.patch_embedding.weight", (width, 3, patch, patch), MATRIX_STD)
    yield TensorSpec("vision_model.embeddings.patch_embedding.bias", (width,))
    for layer in range(shapes.encoder_layers):
        name = f"vision_model.encoder.layers.{layer}"
        yield from norm(f"{name}.layer_norm1", width)
        yield from linear(f"{name}.self_attn.qkv", 3 * width, width)
        yield from linear(f"{name}.self_attn.projection", width, width)
        yield from norm(f"{name}.layer_norm2", width)
        yield from linear(f"{name}.mlp.fc1", inner, width)
        yield from linear(f"{name}.mlp.fc2", width, inner)
    yield from norm("vision_model.post_layernorm", width)


def _decoder(shapes: Shapes) -> Iterator[TensorSpec]:
    width, inner = shapes.width, shapes.inner
    embeddings = "text_decoder.bert.embeddings"
    yield TensorSpec(f"{embeddings}.word_embeddings.weight", (shapes.vocab_size, width), MATRIX_STD)
    yield TensorSpec(f"{embeddings}.position_embeddings.weight", (shapes.positions, width), POSITION_STD)
    yield from norm(f"{embeddings}.LayerNorm", width)
    for layer in range(shapes.decoder_layers):
        name = f"text_decoder.bert.encoder.layer.{layer}"
        for attention in ("attention", "crossattention"):
            for part in ("query", "key", "value"):
                yield from linear(f"{name}.{attention}.self.{part}", width, width)
            yield from linear(f"{name}.{attention}.output.dense", width, width)
            yield from norm(f"{name}.{attention}.output.LayerNorm", width)
        yield from linear(f"{name}.intermediate.dense", inner, width)
        yield from linear(f"{name}.output.dense", width, inner)
        yield from norm(f"{name}.output.LayerNorm", width)
    head = "text_decoder.cls.predictions"
    yield from linear(f"{head}.transform.dense", width, width)
    yield from norm(f"{head}.transform.LayerNorm", width)
    yield TensorSpec(f"{head}.bias", (shapes.vocab_size,), exceptions=dict.fromkeys((PADDING, SEP), NEVER))


def files(shapes: Shapes) -> Files:
    vision = vit_config("blip_vision_model", shapes, attention_dropout=0.0, layer_norm_eps=1e-5)
    text = {
        "model_type": "blip_text_model",
        "vocab_size": shapes.vocab_size,
        "max_position_embeddings": shapes.positions,
        "hidden_size": shapes.width,
        "encoder_hidden_size": shapes.width,
        "num_hidden_layers": shapes.decoder_layers,
        "num_attention_heads": shapes.heads,
        "intermediate_size": shapes.inner,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-12,
        "is_decoder": True,
        "use_cache": True,
        "tie_word_embeddings": True,
        "bos_token_id": start_id(shapes.vocab_size),
        "sep_token_id": SEP,
        "eos_token_id": SEP,
        "pad_token_id": PADDING,
    }
    small: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["BlipForConditionalGeneration"],
            "model_type": "blip",
            "tie_word_embeddings": True,
            "vision_config": vision,
            "text_config": text,
        },
        "generation_config.json": {"max_new_tokens": shapes.new_tokens, "pad_token_id": PADDING},
        "preprocessor_config.json": processor_config(
            "BlipImageProcessor",
            shapes,
            do_convert_rgb=True,
            resample=3,
            image_mean=[0.48145466, 0.4578275, 0.40821073],
            image_std=[0.26862954, 0.26130258, 0.27577711],
        ),
        "tokenizer_config.json": {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "clean_up_tokenization_spaces": True,
            "unk_token": "[UNK]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "mask_token": "[MASK]",
            "model_max_length": shapes.positions,
        },
    }
    return Files(small, word_piece_tokenizer(shapes.vocab_size))
