"""A captioner with random weights in real shapes, as `VisionEncoderDecoderModel.save_pretrained` writes it.

    python -m benchmarks.random_checkpoint vit-b16-gpt2 FOLDER

Made without transformers and always the same for a seed. It has no end token, so every caption is exactly as long
as `max_new_tokens` for whoever serves it; its captions mean nothing.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 0
# With GPT-2's initial 0.02 a tied head repeats the token it has just read for ever; so captions vary.
MATRIX_STD = 0.03
POSITION_STD = 0.5


@dataclass(frozen=True)
class Shapes:
    """Dimensions of a ViT encoder and a GPT-2 decoder of the same width; captions have ``new_tokens``."""

    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    heads: int = 12
    encoder_layers: int = 12
    decoder_layers: int = 12
    inner: int = 3072
    vocab_size: int = 50257
    positions: int = 1024
    new_tokens: int = 20
    dtype: str = "bfloat16"


# ViT-B/16 at 224 pixels and GPT-2 small with cross-attention: 239 M parameters.
SHAPES = {"vit-b16-gpt2": Shapes()}


def write_checkpoint(shapes: Shapes, folder: Path) -> None:
    """Write all files; the folder appears whole or not at all."""
    staging = folder.with_name(folder.name + ".part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for name, content in _json_files(shapes).items():
        (staging / name).write_text(json.dumps(content, indent=2) + "\n")
    (staging / "tokenizer.json").write_text(json.dumps(_tokenizer(shapes.vocab_size)))
    _write_weights(shapes, staging / "model.safetensors")
    (staging / "model.safetensors").chmod(0o644)  # some versions write it for the owner alone
    staging.replace(folder)


def tensor_shapes(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the file's order."""
    width, inner = shapes.width, shapes.inner
    tokens = (shapes.image_size // shapes.patch_size) ** 2 + 1

    def linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (outputs, inputs)
        yield f"{name}.bias", (outputs,)

    def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)

    def conv1d(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (inputs, outputs)  # GPT-2 keeps its matrices transposed
        yield f"{name}.bias", (outputs,)

    yield "encoder.embeddings.cls_token", (1, 1, width)
    yield "encoder.embeddings.position_embeddings", (1, tokens, width)
    patch = "encoder.embeddings.patch_embeddings.projection"
    yield f"{patch}.weight", (width, 3, shapes.patch_size, shapes.patch_size)
    yield f"{patch}.bias", (width,)
    for layer in range(shapes.encoder_layers):
        name = f"encoder.encoder.layer.{layer}"
        yield from norm(f"{name}.layernorm_before")
        for part in ("query", "key", "value"):
            yield from linear(f"{name}.attention.attention.{part}", width, width)
        yield from linear(f"{name}.attention.output.dense", width, width)
        yield from norm(f"{name}.layernorm_after")
        yield from linear(f"{name}.intermediate.dense", inner, width)
        yield from linear(f"{name}.output.dense", width, inner)
    yield from norm("encoder.layernorm")
    yield "decoder.transformer.wte.weight", (shapes.vocab_size, width)
    yield "decoder.transformer.wpe.weight", (shapes.positions, width)
    for layer in range(shapes.decoder_layers):
        name = f"decoder.transformer.h.{layer}"
        yield from norm(f"{name}.ln_1")
        yield from conv1d(f"{name}.attn.c_attn", width, 3 * width)
        yield from conv1d(f"{name}.attn.c_proj", width, width)
        yield from norm(f"{name}.ln_cross_attn")
        yield from conv1d(f"{name}.crossattention.q_attn", width, width)
        yield from conv1d(f"{name}.crossattention.c_attn", width, 2 * width)
        yield from conv1d(f"{name}.crossattention.c_proj", width, width)
        yield from norm(f"{name}.ln_2")
        yield from conv1d(f"{name}.mlp.c_fc", width, inner)
        yield from conv1d(f"{name}.mlp.c_proj", inner, width)
    yield from norm("decoder.transformer.ln_f")


def _write_weights(shapes: Shapes, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    dtype = getattr(torch, shapes.dtype)
    tensors = {}
    for name, shape in tensor_shapes(shapes):
        if len(shape) == 1:  # norms scale by one; every bias is zero
            is_norm = name.endswith(".weight")
            tensors[name] = torch.full(shape, float(is_norm), dtype=dtype)
        else:
            std = POSITION_STD if "wpe" in name else MATRIX_STD
            tensors[name] = (torch.randn(shape, generator=generator) * std).to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})


def _json_files(shapes: Shapes) -> dict[str, dict[str, Any]]:
    last = shapes.vocab_size - 1  # the start token, as GPT-2's <|endoftext|>
    no_end = {"bos_token_id": last, "eos_token_id": None, "pad_token_id": last}
    encoder = {
        "model_type": "vit",
        "image_size": shapes.image_size,
        "patch_size": shapes.patch_size,
        "num_channels": 3,
        "hidden_size": shapes.width,
        "num_hidden_layers": shapes.encoder_layers,
        "num_attention_heads": shapes.heads,
        "intermediate_size": shapes.inner,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-12,
        "qkv_bias": True,
    }
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
    side = {"height": shapes.image_size, "width": shapes.image_size}
    return {
        "config.json": {
            "architectures": ["VisionEncoderDecoderModel"],
            "model_type": "vision-encoder-decoder",
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
            "dtype": shapes.dtype,
            "decoder_start_token_id": last,
            **no_end,
            "encoder": encoder,
            "decoder": decoder,
        },
        "generation_config.json": {
            "decoder_start_token_id": last,
            "max_new_tokens": shapes.new_tokens,
            **no_end,
        },
        "preprocessor_config.json": {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "size": side,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
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


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE `tokenizer.json` with made-up merges; at GPT-2's size it takes as long to load."""
    alphabet = _byte_alphabet()
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[str] = []
    letters = [symbol for symbol in alphabet if symbol.isascii() and symbol.isalpha()]
    pieces = ["\u0120", *letters]  # U+0120 stands for a space
    chooser = random.Random(SEED)
    while len(vocab) < vocab_size - 1:
        left, right = chooser.choice(pieces), chooser.choice(letters if chooser.random() < 0.7 else pieces)
        joined = left + right
        if joined in vocab or len(joined) > 10 or "\u0120" in joined[1:]:
            continue
        vocab[joined] = len(vocab)
        pieces.append(joined)
        merges.append(f"{left} {right}")
    end = {"id": vocab_size - 1, "content": "<|endoftext|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    vocab["<|endoftext|>"] = vocab_size - 1
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "fuse_unk": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {**model, "end_of_word_suffix": "", "byte_fallback": False, "vocab": vocab, "merges": merges},
    }


def _byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary: printable ones for themselves, the others from
    U+0100 on (`bytes_to_unicode` of its reference code)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in sorted(printable)] + [chr(256 + index) for index in range(len(moved))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write_checkpoint(SHAPES[options.shapes], options.folder)


if __name__ == "__main__":
    main()
