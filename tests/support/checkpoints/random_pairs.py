"""Configures a vision-encoder-decoder's pairs other than ViT and GPT-2, and lists captioners of every family."""

from collections.abc import Callable
from typing import Any

import transformers
from support.checkpoints import random_captioners
from support.checkpoints.random_captioners import TEXT, VISION

DECODES = {"is_decoder": True, "add_cross_attention": True}


def vit(**changes: Any) -> Any:
    return transformers.ViTConfig(**VISION | changes)


def deit(**changes: Any) -> Any:
    return transformers.DeiTConfig(**VISION | changes)


def beit(**changes: Any) -> Any:
    return transformers.BeitConfig(**VISION | changes)


def bert(**changes: Any) -> Any:
    return transformers.BertConfig(**TEXT | DECODES | changes)


def roberta(**changes: Any) -> Any:
    return transformers.RobertaConfig(**TEXT | DECODES | {"pad_token_id": 1} | changes)


def trocr(**changes: Any) -> Any:
    text = {"vocab_size": 97, "d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 3}
    return transformers.TrOCRConfig(**text | {"decoder_ffn_dim": 80, "max_position_embeddings": 64} | changes)


# Fields of TrOCR's configurations on the hub: base, large (sinusoidal, no norm) and small (DeiT, scaled embedding).
LARGE = {
    "activation_function": "relu",
    "layernorm_embedding": False,
    "scale_embedding": True,
    "use_learned_position_embeddings": False,
}
PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "vit and bert": lambda: (vit(), bert()),
    "wider vit and bert": lambda: (vit(hidden_size=72), bert()),
    "bert with one token type, an own head and relu": lambda: (
        vit(),
        bert(type_vocab_size=1, tie_word_embeddings=False, hidden_act="relu"),
    ),
    "vit and roberta": lambda: (vit(), roberta()),
    "roberta with relu, and padding last": lambda: (vit(), roberta(hidden_act="relu", pad_token_id=9)),
    "wider vit and roberta with an own head": lambda: (vit(hidden_size=72), roberta(tie_word_embeddings=False)),
    "deit and bert": lambda: (deit(), bert()),
    "deit and gpt2": lambda: (
        deit(image_size=100, patch_size=[16, 8], qkv_bias=False),
        transformers.GPT2Config(vocab_size=97, n_positions=64, n_embd=48, n_layer=2, n_head=3),
    ),
    "beit with relative positions": lambda: (beit(use_relative_position_bias=True), bert()),
    "beit with shared ones, no scale and a projection": lambda: (
        beit(
            use_shared_relative_position_bias=True,
            layer_scale_init_value=0.0,
            hidden_size=72,
            num_attention_heads=6,
        ),
        bert(),
    ),
    "beit with both, and both kinds of norm": lambda: (
        beit(
            use_shared_relative_position_bias=True,
            use_relative_position_bias=True,
            use_absolute_position_embeddings=True,
            use_mask_token=True,
            use_mean_pooling=False,
        ),
        roberta(),
    ),
    "beit with absolute positions": lambda: (
        beit(use_absolute_position_embeddings=True, image_size=100, patch_size=12),
        trocr(),
    ),
    "trocr base": lambda: (vit(qkv_bias=False, hidden_size=72), trocr(cross_attention_hidden_size=72)),
    "trocr large": lambda: (vit(qkv_bias=False), trocr(cross_attention_hidden_size=48, **LARGE)),
    "trocr small": lambda: (
        deit(hidden_size=72),
        trocr(cross_attention_hidden_size=72, scale_embedding=True, tie_word_embeddings=False),
    ),
    "trocr with a projection": lambda: (vit(hidden_size=72), trocr()),
    "trocr of an odd width": lambda: (
        vit(),
        trocr(d_model=51, use_learned_position_embeddings=False, decoder_attention_heads=3),
    ),
}
# A random one of every pair and of every family that is no pair.
CAPTIONERS: dict[str, Callable[[], Any]] = {
    "blip": random_captioners.blip,
    "florence2": random_captioners.florence2,
    "git": random_captioners.git,
    "llava": random_captioners.llava,
    "smolvlm": random_captioners.smolvlm,
    **{name: lambda make=make: random_captioners.pair(*make()) for name, make in PAIRS.items()},
}
