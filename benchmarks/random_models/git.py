"""Describes GIT's tensors and files, as `GitForCausalLM.save_pretrained` writes them.

Its end token is [SEP], and transformers counts what comes before it or [PAD]: the head's bias keeps both from ever
being chosen.
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
from snapcap.benchmarks.random_models.word_pieces import CLS, NEVER, PADDING, SEP, word_piece_tokenizer


def tensors(shapes: Shapes) -> Iterator[TensorSpec]:
    yield from _encoder(shapes)
    yield from _decoder(shapes)


def _encoder(shapes: Shapes) -> Iterator[TensorSpec]:
    width, inner, patch = shapes.width, shapes.inner, shapes.patch_size
    vision = "git.image_encoder.vision_model"
    yield TensorSpec(f"{vision}.embeddings.class_embedding", (width,), MATRIX_STD)
    yield TensorSpec(f"{vision}.embeddings.patch_embedding.weight", (width, 3, patch, patch), MATRIX_STD)
    yield TensorSpec(f"{vision}.embeddings.position_embedding.weight", (shapes.image_tokens, width), MATRIX_STD)
    yield from norm(f"{vision}.pre_layrnorm", width)
    for layer in range(shapes.encoder_layers):
        name = f"{vision}.encoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{name}.self_attn.{part}", width, width)
        yield from norm(f"{name}.layer_norm1", width)
        yield from norm(f"{name}.layer_norm2", width)
        yield from linear(f"{name}.mlp.fc1", inner, width)
        yield from linear(f"{name}.mlp.fc2", width, inner)
    yield from norm(f"{vision}.post_layernorm", width)
    yield from linear("git.visual_projection.visual_projection.0", width, width)
    yield from norm("git.visual_projection.visual_projection.1", width)


def _decoder(shapes: Shapes) -> Iterator[TensorSpec]:
    width, inner = shapes.width, shapes.inner
    yield TensorSpec("git.embeddings.word_embeddings.weight", (shapes.vocab_size, width), MATRIX_STD)
    yield TensorSpec("git.embeddings.position_embeddings.weight", (shapes.positions, width), POSITION_STD)
    yield from norm("git.embeddings.LayerNorm", width)
    for layer in range(shapes.decoder_layers):
        name = f"git.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield from linear(f"{name}.attention.self.{part}", width, width)
        yield from linear(f"{name}.attention.output.dense", width, width)
        yield from norm(f"{name}.attention.output.LayerNorm", width)
        yield from linear(f"{name}.intermediate.dense", inner, width)
        yield from linear(f"{name}.output.dense", width, inner)
        yield from norm(f"{name}.output.LayerNorm", width)
    yield TensorSpec("output.weight", (shapes.vocab_size, width), MATRIX_STD)
    yield TensorSpec("output.bias", (shapes.vocab_size,), exceptions=dict.fromkeys((PADDING, SEP), NEVER))


def files(shapes: Shapes) -> Files:
    vision = vit_config("git_vision_model", shapes, attention_dropout=0.0, layer_norm_eps=1e-5)
    specials = {"bos_token_id": CLS, "eos_token_id": SEP, "pad_token_id": PADDING}
    small: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["GitForCausalLM"],
            "model_type": "git",
            "vocab_size": shapes.vocab_size,
            "hidden_size": shapes.width,
            "num_hidden_layers": shapes.decoder_layers,
            "num_attention_heads": shapes.heads,
            "intermediate_size": shapes.inner,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": shapes.positions,
            "layer_norm_eps": 1e-12,
            "num_image_with_embedding": None,
            "tie_word_embeddings": False,
            "vision_config": {**vision, "hidden_act": "quick_gelu"},
            **specials,
        },
        "generation_config.json": {"max_new_tokens": shapes.new_tokens, **specials},
        "preprocessor_config.json": {
            **processor_config(
                "CLIPImageProcessor",
                shapes,
                do_convert_rgb=True,
                do_center_crop=True,
                resample=3,
                image_mean=[0.48145466, 0.4578275, 0.40821073],
                image_std=[0.26862954, 0.26130258, 0.27577711],
            ),
            "size": {"shortest_edge": shapes.image_size},
            "crop_size": {"height": shapes.image_size, "width": shapes.image_size},
        },
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
