"""Describes a ViT encoder and a GPT-2 decoder, as `VisionEncoderDecoderModel.save_pretrained` writes them.

It has no end token at all.
"""

from collections.abc import Iterator
from typing import Any

from snapcap.benchmarks.random_models.byte_pairs import byte_pair_tokenizer
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


def tensors(shapes: Shapes) -> Iterator[TensorSpec]:
    yield from _encoder(shapes)
    yield from _decoder(shapes)


def _encoder(shapes: Shapes) -> Iterator[TensorSpec]:
    width, inner, patch = shapes.width, shapes.inner, shapes.patch_size
    yield TensorSpec("encoder.embeddings.cls_token", (1, 1, width), MATRIX_STD)
    yield TensorSpec("encoder.embeddings.position_embeddings", (1, shapes.image_tokens, width), MATRIX_STD)
    projection = "encoder.embeddings.patch_embeddings.projection"
    yield TensorSpec(f"{projection}.weight", (width, 3, patch, patch), MATRIX_STD)
    yield TensorSpec(f"{projection}.bias", (width,))
    for layer in range(shapes.encoder_layers):
        name = f"encoder.encoder.layer.{layer}"
        yield from norm(f"{name}.layernorm_before", width)
        for part in ("query", "key", "value"):
            yield from linear(f"{name}.attention.attention.{part}", width, width)
        yield from linear(f"{name}.attention.output.dense", width, width)
        yield from norm(f"{name}.layernorm_after", width)
        yield from linear(f"{name}.intermediate.dense", inner, width)
        yield from linear(f"{name}.output.dense", width, inner)
    yield from norm("encoder.layernorm", width)


def _decoder(shapes: Shapes) -> Iterator[TensorSpec]:
    width, inner = shapes.width, shapes.inner
    yield TensorSpec("decoder.transformer.wte.weight", (shapes.vocab_size, width), MATRIX_STD)
    yield TensorSpec("decoder.transformer.wpe.weight", (shapes.positions, width), POSITION_STD)
    for layer in range(shapes.decoder_layers):
        name = f"decoder.transformer.h.{layer}"
        yield from norm(f"{name}.ln_1", width)
        yield from _conv1d(f"{name}.attn.c_attn", width, 3 * width)
        yield from _conv1d(f"{name}.attn.c_proj", width, width)
        yield from norm(f"{name}.ln_cross_attn", width)
        yield from _conv1d(f"{name}.crossattention.q_attn", width, width)
        yield from _conv1d(f"{name}.crossattention.c_attn", width, 2 * width)
        yield from _conv1d(f"{name}.crossattention.c_proj", width, width)
        yield from norm(f"{name}.ln_2", width)
        yield from _conv1d(f"{name}.mlp.c_fc", width, inner)
        yield from _conv1d(f"{name}.mlp.c_proj", inner, width)
    yield from norm("decoder.transformer.ln_f", width)


def _conv1d(name: str, inputs: int, outputs: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (inputs, outputs), MATRIX_STD)  # GPT-2 keeps its matrices transposed
    yield TensorSpec(f"{name}.bias", (outputs,))


def files(shapes: Shapes) -> Files:
    last = shapes.vocab_size - 1  # the start token, as GPT-2's <|endoftext|>
    no_end = {"bos_token_id": last, "eos_token_id": None, "pad_token_id": last}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = vit_config("vit", shapes, num_channels=3, **no_dropout, layer_norm_eps=1e-12, qkv_bias=True)
    decoder = {
        "model_type": "gpt2",
        "vocab_size": shapes.vocab_size,
        "n_positions": shapes.positions,
        "n_embd": shapes.width,
        "n_layer": shapes.decoder_layers,
        "n_head": shapes.heads,
        "n_inner": shapes.inner,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5,
        "add_cross_attention": True,
        "is_decoder": True,
        "tie_word_embeddings": True,
        **no_end,
    }
    small: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["VisionEncoderDecoderModel"],
            "model_type": "vision-encoder-decoder",
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
            "decoder_start_token_id": last,
            **no_end,
            "encoder": encoder,
            "decoder": decoder,
        },
        "generation_config.json": {"decoder_start_token_id": last, "max_new_tokens": shapes.new_tokens, **no_end},
        "preprocessor_config.json": processor_config(
            "ViTImageProcessor", shapes, resample=2, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5]
        ),
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": False,
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": shapes.positions,
        },
    }
    return Files(small, byte_pair_tokenizer(shapes.vocab_size))
