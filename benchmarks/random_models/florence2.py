"""Describes Florence-2's tensors and files, as `Florence2ForConditionalGeneration.save_pretrained` writes them.

Its end token is the last of the byte pairs: its row of the head is zero, and some other token always scores above
that. Captions are greedy, as the other models' are; the checkpoints on the hub search with three beams.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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
)

# Of the sentences that stand for its tasks; each is a token, as nearly all are in BART's vocabulary.
_WORDS = (
    *("What", " does", " the", " image", " describe?", "Describe", " in", " detail", " what", " is", " shown"),
    *(" image.", " with", " a", " paragraph"),
)
_FRAMES = 100
_CROSS_STD = 0.2  # so that a caption depends on the image


@dataclass(frozen=True)
class Florence2Shapes(Shapes):
    """``width``, ``heads``, ``inner`` and ``encoder_layers`` are BART's; the others DaViT's, one a stage."""

    widths: tuple[int, ...] = (128, 256, 512, 1024)
    depths: tuple[int, ...] = (1, 1, 9, 1)
    stage_heads: tuple[int, ...] = (4, 8, 16, 32)
    kernels: tuple[int, ...] = (7, 3, 3, 3)
    window: int = 12
    image_positions: int = 50

    @property
    def end(self) -> int:
        """The token that ends a caption."""
        return self.vocab_size - len(_WORDS) - 2


def tensors(shapes: Florence2Shapes) -> Iterator[TensorSpec]:
    yield from _vision(shapes)
    yield from _projector(shapes)
    language = "model.language_model"
    never = {shapes.end: 0.0}
    yield TensorSpec(f"{language}.shared.weight", (shapes.vocab_size, shapes.width), MATRIX_STD, exceptions=never)
    yield from _bart(f"{language}.encoder", shapes.encoder_layers, ("self_attn",), shapes)
    yield from _bart(f"{language}.decoder", shapes.decoder_layers, ("self_attn", "encoder_attn"), shapes)


def _vision(shapes: Florence2Shapes) -> Iterator[TensorSpec]:
    tower, inputs = "model.vision_tower", 3
    for stage, (width, depth, kernel) in enumerate(zip(shapes.widths, shapes.depths, shapes.kernels, strict=True)):
        convolution = f"{tower}.convs.{stage}"
        yield TensorSpec(f"{convolution}.conv.weight", (width, inputs, kernel, kernel), MATRIX_STD)
        yield TensorSpec(f"{convolution}.conv.bias", (width,))
        yield from norm(f"{convolution}.norm", width if stage == 0 else inputs)
        for layer in range(depth):
            for kind, attention in (("spatial", "window_attn"), ("channel", "channel_attn")):
                name = f"{tower}.blocks.{stage}.{layer}.{kind}_block"
                for place in (1, 2):
                    yield TensorSpec(f"{name}.conv{place}.weight", (width, 1, 3, 3), MATRIX_STD)
                    yield TensorSpec(f"{name}.conv{place}.bias", (width,))
                    yield from norm(f"{name}.norm{place}", width)
                yield from linear(f"{name}.{attention}.qkv", 3 * width, width)
                yield from linear(f"{name}.{attention}.proj", width, width)
                yield from linear(f"{name}.ffn.fc1", 4 * width, width)
                yield from linear(f"{name}.ffn.fc2", width, 4 * width)
        inputs = width


def _projector(shapes: Florence2Shapes) -> Iterator[TensorSpec]:
    projector, width = "model.multi_modal_projector", shapes.widths[-1]
    yield TensorSpec(f"{projector}.image_projection.weight", (shapes.width, width), MATRIX_STD)
    yield from norm(f"{projector}.image_proj_norm", shapes.width)
    for axis in ("row", "column"):
        name = f"{projector}.image_position_embed.{axis}_embeddings.weight"
        yield TensorSpec(name, (shapes.image_positions, width // 2), MATRIX_STD)
    # Sines and cosines of the frame's number, which is 0 for an image.
    name = f"{projector}.visual_temporal_embed.pos_idx_to_embed"
    yield TensorSpec(name, (_FRAMES, width), exceptions={(..., tuple(range(1, width, 2))): 1.0})


def _bart(part: str, layers: int, attentions: tuple[str, ...], shapes: Florence2Shapes) -> Iterator[TensorSpec]:
    width, inner = shapes.width, shapes.inner
    yield TensorSpec(f"{part}.embed_positions.weight", (shapes.positions + 2, width), POSITION_STD)
    yield from norm(f"{part}.layernorm_embedding", width)
    for layer in range(layers):
        name = f"{part}.layers.{layer}"
        for attention in attentions:
            std = _CROSS_STD if attention == "encoder_attn" else MATRIX_STD
            for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
                yield TensorSpec(f"{name}.{attention}.{projection}.weight", (width, width), std)
                yield TensorSpec(f"{name}.{attention}.{projection}.bias", (width,))
            yield from norm(f"{name}.{attention}_layer_norm", width)
        yield from linear(f"{name}.fc1", inner, width)
        yield from linear(f"{name}.fc2", width, inner)
        yield from norm(f"{name}.final_layer_norm", width)


def files(shapes: Florence2Shapes) -> Files:
    tokenizer = byte_pair_tokenizer(shapes.end + 1)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for place, content in enumerate((*_WORDS, "<image>")):
        token = {**plain, "id": shapes.end + 1 + place, "content": content, "special": content == "<image>"}
        tokenizer["added_tokens"].append(token)
    specials = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), shapes.end)
    small: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["Florence2ForConditionalGeneration"],
            "model_type": "florence2",
            "image_token_id": shapes.vocab_size - 1,
            "tie_word_embeddings": True,
            "vision_config": _vision_config(shapes),
            "text_config": _text_config(shapes, specials),
            **specials,
        },
        "generation_config.json": {"max_new_tokens": shapes.new_tokens, "num_beams": 1, **specials},
        "preprocessor_config.json": processor_config(
            "CLIPImageProcessor",
            shapes,
            do_center_crop=False,
            resample=3,
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
        ),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
            "model_max_length": shapes.positions,
        },
    }
    return Files(small, tokenizer)


def _vision_config(shapes: Florence2Shapes) -> dict[str, Any]:
    return {
        "model_type": "florence_vision",
        "image_size": shapes.image_size,
        "embed_dim": shapes.widths,
        "depths": shapes.depths,
        "num_heads": shapes.stage_heads,
        "num_groups": shapes.stage_heads,
        "patch_size": shapes.kernels,
        "patch_stride": [4, 2, 2, 2],
        "patch_padding": [3, 1, 1, 1],
        "patch_prenorm": [False, True, True, True],
        "window_size": shapes.window,
        "projection_dim": shapes.width,
        "max_position_embeddings": shapes.image_positions,
        "drop_path_rate": 0.0,
    }


def _text_config(shapes: Florence2Shapes, specials: dict[str, int]) -> dict[str, Any]:
    return {
        "model_type": "bart",
        "vocab_size": shapes.vocab_size,
        "d_model": shapes.width,
        "max_position_embeddings": shapes.positions,
        "activation_function": "gelu",
        "scale_embedding": False,
        "forced_eos_token_id": None,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        **specials,
        **{
            f"{part}_{field}": value
            for part, layers in (("encoder", shapes.encoder_layers), ("decoder", shapes.decoder_layers))
            for field, value in (
                ("layers", layers),
                ("attention_heads", shapes.heads),
                ("ffn_dim", shapes.inner),
                ("layerdrop", 0.0),
            )
        },
    }
