"""Describes what random models that take instructions share: SigLIP, Llama, a tokenizer and a chat template.

The end token is the last one: its row of the head is zero, and some other token always scores above that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from snapcap.benchmarks.random_models.byte_pairs import byte_pair_tokenizer
from snapcap.benchmarks.random_models.tensors import MATRIX_STD, Files, Shapes, TensorSpec, linear, norm

SPECIALS = ("<|im_start|>", "<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
# Of the default instruction and what follows it: it takes eleven tokens, as with the checkpoints' own tokenizer.
_WORDS = ("Can", "\u0120you", "\u0120describe", "\u0120this", "\u0120image", "Ass", "istant")
# As the checkpoints have it.
_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class ChatShapes(Shapes):
    """Dimensions of a decoder of another width than the encoder's; ``heads`` and ``inner`` are the encoder's.

    pixel_shuffle: patches of a side of the square that becomes one token.
    """

    text_width: int = 576
    text_heads: int = 9
    kv_heads: int = 3
    text_inner: int = 1536
    pixel_shuffle: int = 4

    @property
    def image_tokens(self) -> int:
        """The patches of an image, without a class token."""
        return (self.image_size // self.patch_size) ** 2


def siglip(shapes: ChatShapes, vision: str) -> Iterator[TensorSpec]:
    """Under a name of its module."""
    width, inner, patch = shapes.width, shapes.inner, shapes.patch_size
    yield TensorSpec(f"{vision}.embeddings.patch_embedding.weight", (width, 3, patch, patch), MATRIX_STD)
    yield TensorSpec(f"{vision}.embeddings.patch_embedding.bias", (width,))
    yield TensorSpec(f"{vision}.embeddings.position_embedding.weight", (shapes.image_tokens, width), MATRIX_STD)
    for layer in range(shapes.encoder_layers):
        name = f"{vision}.encoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{name}.self_attn.{part}", width, width)
        yield from norm(f"{name}.layer_norm1", width)
        yield from norm(f"{name}.layer_norm2", width)
        yield from linear(f"{name}.mlp.fc1", inner, width)
        yield from linear(f"{name}.mlp.fc2", width, inner)
    yield from norm(f"{vision}.post_layernorm", width)


def llama(shapes: ChatShapes, text: str) -> Iterator[TensorSpec]:
    """Likewise, and the head."""
    width, inner = shapes.text_width, shapes.text_inner
    shared = width // shapes.text_heads * shapes.kv_heads
    rows = {"q_proj": width, "k_proj": shared, "v_proj": shared, "o_proj": width}
    yield TensorSpec(f"{text}.embed_tokens.weight", (shapes.vocab_size, width), MATRIX_STD)
    for layer in range(shapes.decoder_layers):
        name = f"{text}.layers.{layer}"
        for part, outputs in rows.items():
            yield TensorSpec(f"{name}.self_attn.{part}.weight", (outputs, width), MATRIX_STD)
        yield TensorSpec(f"{name}.mlp.gate_proj.weight", (inner, width), MATRIX_STD)
        yield TensorSpec(f"{name}.mlp.up_proj.weight", (inner, width), MATRIX_STD)
        yield TensorSpec(f"{name}.mlp.down_proj.weight", (width, inner), MATRIX_STD)
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield TensorSpec(f"{name}.{part}.weight", (width,), value=1.0)
    yield TensorSpec(f"{text}.norm.weight", (width,), value=1.0)
    never = {shapes.vocab_size - 1: 0.0}
    yield TensorSpec("lm_head.weight", (shapes.vocab_size, width), MATRIX_STD, exceptions=never)


def special_ids(shapes: ChatShapes) -> dict[str, int]:
    """Of what begins, ends and fills up a text."""
    start = shapes.vocab_size - len(SPECIALS)
    return {"bos_token_id": start, "eos_token_id": shapes.vocab_size - 1, "pad_token_id": start - 1}


def image_id(shapes: ChatShapes) -> int:
    return shapes.vocab_size - len(SPECIALS) + SPECIALS.index("<image>")


def text_config(shapes: ChatShapes, **further: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": shapes.vocab_size,
        "hidden_size": shapes.text_width,
        "intermediate_size": shapes.text_inner,
        "num_hidden_layers": shapes.decoder_layers,
        "num_attention_heads": shapes.text_heads,
        "num_key_value_heads": shapes.kv_heads,
        "max_position_embeddings": shapes.positions,
        "rms_norm_eps": 1e-5,
        **special_ids(shapes),
        **further,
    }


def files(
    shapes: ChatShapes, config: Mapping[str, Any], processor: Mapping[str, Any], image: str = "<image>"
) -> Files:
    """With what every one of these checkpoints has beside its configuration and its image processor; ``image`` is
    what its template puts for one."""
    small = {
        "config.json": config,
        "generation_config.json": {"max_new_tokens": shapes.new_tokens, **special_ids(shapes)},
        "preprocessor_config.json": {
            **processor,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2TokenizerFast",
            "bos_token": SPECIALS[0],
            "eos_token": SPECIALS[-1],
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": shapes.positions,
        },
        "chat_template.json": {"chat_template": _TEMPLATE.replace("<image>", image)},
    }
    return Files(small, _tokenizer(shapes.vocab_size - len(SPECIALS)))


def _tokenizer(first: int) -> dict[str, Any]:
    """Byte pairs, and from ``first`` on the special tokens."""
    tokenizer = byte_pair_tokenizer(first, *_WORDS)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": first + place, "content": token, "special": True, **flags} for place, token in enumerate(SPECIALS)
    ]
    return tokenizer
