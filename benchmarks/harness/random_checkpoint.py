"""Writes a captioner with random weights in real shapes, by transformers' configurations and `save_pretrained`.

    python -m snapcap.benchmarks.harness.random_checkpoint vit-b16-gpt2 FOLDER

The same command writes the same files. The configuration does not name the dtype of the stored weights, so on a
CPU snapcap runs them in float32, as the peers do. A token that ends a caption is never chosen: for every server,
each caption is exactly as long as its limit, and has no meaning.
"""

import contextlib
import importlib
import json
import re
import string
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, pairwise, product
from pathlib import Path
from typing import Any

import torch
from tokenizers.implementations.base_tokenizer import BaseTokenizer
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer
from tokenizers.pre_tokenizers import ByteLevel

from snapcap.benchmarks.harness.workload import NEW_TOKENS

# Untyped, because its configurations accept more than their types say.
transformers: Any = importlib.import_module("transformers")
initialization: Any = importlib.import_module("transformers.initialization")
SEED = 0
# With the usual initial 0.02, a tied head repeats the last token for ever. These values make captions vary.
_MATRIX_STD, _POSITION_STD = 0.03, 0.5
_CROSS_STD = 0.2  # for Florence-2's cross-attention, so that a caption depends on the image
_POSITIONS = re.compile(r"(wpe|embed_positions|\bembeddings\.position_embeddings)\.weight")
_NEVER = -1e4  # bias of a token that must not be chosen: far below every logit, and within float16
_PADDING, _UNKNOWN, _CLS, _SEP, _MASK = 0, 100, 101, 102, 103  # the ids of bert-base-uncased
_END = "<|endoftext|>"
_CHAT_TOKENS = ("<|im_start|>", "<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
# Like in the checkpoints' own tokenizer, the default instruction and the text behind it are eleven tokens.
_CHAT_WORDS = ("Can", "Ġyou", "Ġdescribe", "Ġthis", "Ġimage", "Ass", "istant")
# The checkpoints' own template.
_CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_QWEN_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|im_end|>")
_QWEN_WORDS = (*_CHAT_WORDS[:-2], "user", "assistant")
# The part of the checkpoints' own template that renders a message of a user.
_QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{message['role']}}\n"
    "{% for line in message['content'] %}{% if line['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{line['text']}}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The words of the sentences for Florence-2's tasks. BART's vocabulary has nearly all of them.
_TASK_WORDS = (
    *("What", " does", " the", " image", " describe?", "Describe", " in", " detail", " what", " is", " shown"),
    *(" image.", " with", " a", " paragraph"),
)


@dataclass(frozen=True)
class Captioner:
    """A checkpoint without its weights.

    special: ids of the special tokens for generation.
    fixed: values at an index of a parameter, by the end of its name. They keep tokens from being chosen.
    """

    config: Any
    architecture: str
    special: Mapping[str, int | None]
    processor: Mapping[str, Any]
    tokenizer: BaseTokenizer
    tokenizer_config: Mapping[str, Any]
    fixed: Mapping[str, Mapping[Any, float]] = field(default_factory=dict)
    template: str = ""

    def model(self) -> Any:
        """Returns transformers' model, with weights as its configuration initialises them."""
        return getattr(transformers, self.architecture)(self.config)


@dataclass(frozen=True)
class RandomModel:
    """A family in given shapes: fields of its vision configuration and its text configuration."""

    family: Callable[[dict[str, Any], dict[str, Any]], Captioner]
    vision: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"

    def describe(self) -> Captioner:
        return self.family(dict(self.vision), dict(self.text))


def _vit_gpt2(vision: dict[str, Any], text: dict[str, Any]) -> Captioner:
    """Returns a pair without an end token. The start token is the last token, as in GPT-2."""
    decoder = {"add_cross_attention": True, "is_decoder": True, **text}
    encoder, config = transformers.ViTConfig(**vision), transformers.GPT2Config(**decoder)
    last = config.vocab_size - 1
    special = {"bos_token_id": last, "eos_token_id": None, "pad_token_id": last, "decoder_start_token_id": last}
    for name, value in special.items():
        setattr(config, name, value)
    pair = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, config, **special)
    return Captioner(
        pair,
        "VisionEncoderDecoderModel",
        special,
        _processor("ViTImageProcessor", encoder.image_size),
        _byte_pairs(config.vocab_size),
        _byte_pair_config("GPT2Tokenizer", config.n_positions, add_prefix_space=False),
    )


def _blip(vision: dict[str, Any], text: dict[str, Any]) -> Captioner:
    """Returns BLIP, whose head never chooses [SEP] or [PAD].

    BLIP needs an end token, and transformers counts only the tokens before it or [PAD].
    """
    size = text.get("vocab_size", 30524)
    special = {"bos_token_id": size - 2, "eos_token_id": _SEP, "pad_token_id": _PADDING}  # [DEC] begins a text
    heads = {"num_attention_heads": 12, **text}  # the published checkpoint's number, not transformers' default
    config = transformers.BlipConfig(vision_config=vision, text_config={**special, "sep_token_id": _SEP, **heads})
    return Captioner(
        config,
        "BlipForConditionalGeneration",
        {"pad_token_id": _PADDING},
        _processor("BlipImageProcessor", config.vision_config.image_size),
        _word_pieces(size),
        _bert_tokenizer(config.text_config.max_position_embeddings),
        {"cls.predictions.bias": dict.fromkeys((_PADDING, _SEP), _NEVER)},
    )


def _git(vision: dict[str, Any], text: dict[str, Any]) -> Captioner:
    """Returns GIT, whose head never chooses [SEP] or [PAD], for the same reason as BLIP's."""
    special = {"bos_token_id": _CLS, "eos_token_id": _SEP, "pad_token_id": _PADDING}
    config = transformers.GitConfig(vision_config=vision, **special, **text)
    side = config.vision_config.image_size
    processor = _processor("CLIPImageProcessor", side)
    return Captioner(
        config,
        "GitForCausalLM",
        special,
        {**processor, "crop_size": processor["size"], "size": {"shortest_edge": side}},
        _word_pieces(config.vocab_size),
        _bert_tokenizer(config.max_position_embeddings),
        {"output.bias": dict.fromkeys((_PADDING, _SEP), _NEVER)},
    )


def _florence2(vision: dict[str, Any], text: dict[str, Any]) -> Captioner:
    """Returns Florence-2, whose head never chooses the end token.

    The end token is the last byte pair. Its row in the head is zero, so another token always has a higher score.
    Captions are greedy, as those of the other models. Checkpoints on the hub search with three beams.
    """
    side, size = vision.pop("image_size", 768), text["vocab_size"]
    end = size - len(_TASK_WORDS) - 2
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    special: dict[str, int | None] = dict.fromkeys(names, end)
    config = transformers.Florence2Config(
        vision_config={**vision, "projection_dim": text["d_model"], "drop_path_rate": 0.0},
        text_config={"model_type": "bart", "forced_eos_token_id": None, **special, **text},
        image_token_id=size - 1,
        tie_word_embeddings=True,
        **special,
    )
    config.vision_config.image_size = side
    tokenizer = _byte_pairs(end + 1)
    tokenizer.add_tokens([*_TASK_WORDS])
    tokenizer.add_special_tokens(["<image>"])
    return Captioner(
        config,
        "Florence2ForConditionalGeneration",
        special,
        {
            **_processor("CLIPImageProcessor", side),
            "do_center_crop": False,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
        tokenizer,
        _byte_pair_config("PreTrainedTokenizerFast", text["max_position_embeddings"]),
        {"shared.weight": {end: 0.0}},
    )


def _smolvlm(vision: dict[str, Any], text: dict[str, Any]) -> Captioner:
    shuffle = vision.pop("scale_factor")
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    config = transformers.Idefics3Config(
        vision_config=vision,
        text_config=_llama(text, rope_parameters=rope),
        image_token_id=_image_id(text),
        scale_factor=shuffle,
        tie_word_embeddings=False,
    )
    side = vision["image_size"]
    processor = _processor("Idefics3ImageProcessor", side)
    processor |= {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}
    return _chat(config, "Idefics3ForConditionalGeneration", text, processor, "<image>")


def _llava(vision: dict[str, Any], text: dict[str, Any]) -> Captioner:
    """Returns JoyCaption's shapes: SigLIP without its last layer, two linear layers, and Llama 3.1."""
    length = min(8192, text["max_position_embeddings"] // 2)
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": length}
    tower = {"model_type": "siglip_vision_model", "vision_use_head": False, **vision}
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=_llama(text, rope_parameters=rope),
        image_token_index=_image_id(text),
        image_seq_length=(vision["image_size"] // vision["patch_size"]) ** 2,
        projector_hidden_act="gelu",
        vision_feature_layer=-2,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    processor = _processor("SiglipImageProcessor", vision["image_size"])
    # A separator token stands between image and text.
    return _chat(config, "LlavaForConditionalGeneration", text, processor, "<image><global-img>")


def _qwen3_vl(vision: dict[str, Any], text: dict[str, Any]) -> Captioner:
    """Returns Qwen3-VL, whose head is the embedding: the end token's row is zero in both."""
    half = text["head_dim"] // 2
    rows = half * 5 // 16
    rope = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_interleaved": True}
    rope["mrope_section"] = [half - 2 * rows, rows, rows]
    config = transformers.Qwen3VLConfig(
        vision_config={"out_hidden_size": text["hidden_size"], **vision},
        text_config={**_chat_ids(text), "rope_parameters": rope, "tie_word_embeddings": True, **text},
        image_token_id=_image_id(text),
        tie_word_embeddings=True,
    )
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    captioner = _chat(
        config, "Qwen3VLForConditionalGeneration", text, processor, "", _QWEN_TOKENS, _QWEN_WORDS, _QWEN_TEMPLATE
    )
    # Every other feature is negated by the last norm: otherwise a tied head would repeat the last token.
    signs = dict.fromkeys(range(1, text["hidden_size"], 2), -1.0)
    fixed = {"embed_tokens.weight": {text["vocab_size"] - 1: 0.0}, "language_model.norm.weight": signs}
    return replace(captioner, fixed=fixed)


def _chat(
    config: Any,
    architecture: str,
    text: Mapping[str, Any],
    processor: Mapping[str, Any],
    image: str,
    tokens: tuple[str, ...] = _CHAT_TOKENS,
    words: tuple[str, ...] = _CHAT_WORDS,
    template: str = _CHAT_TEMPLATE,
) -> Captioner:
    """Returns a model that takes instructions, whose head never chooses the end token.

    ``image`` is the text for an image in the chat template. The end token is the last token. Its row in the head
    is zero, so another token always has a higher score.
    """
    tokenizer = _byte_pairs(text["vocab_size"] - len(tokens), *words)
    tokenizer.add_special_tokens([*tokens])
    return Captioner(
        config,
        architecture,
        _chat_ids(text),
        processor,
        tokenizer,
        _byte_pair_config(
            "GPT2TokenizerFast", text["max_position_embeddings"], bos_token=tokens[0], eos_token=tokens[-1]
        ),
        {"lm_head.weight": {text["vocab_size"] - 1: 0.0}},
        template.replace("<image>", image),
    )


def _llama(text: Mapping[str, Any], **further: Any) -> dict[str, Any]:
    return {"model_type": "llama", "rms_norm_eps": 1e-5, **_chat_ids(text), **further, **text}


def _chat_ids(text: Mapping[str, Any]) -> dict[str, int | None]:
    start = text["vocab_size"] - len(_CHAT_TOKENS)
    return {"bos_token_id": start, "eos_token_id": text["vocab_size"] - 1, "pad_token_id": start - 1}


def _image_id(text: Mapping[str, Any]) -> int:
    return int(text["vocab_size"]) - len(_CHAT_TOKENS) + _CHAT_TOKENS.index("<image>")


def _processor(kind: str, side: int) -> dict[str, Any]:
    """Returns the fields of an image processor that are not its defaults."""
    return {"image_processor_type": kind, "size": {"height": side, "width": side}}


def _byte_pair_config(kind: str, length: int, **further: Any) -> dict[str, Any]:
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _END)
    return {
        "tokenizer_class": kind,
        "clean_up_tokenization_spaces": False,
        **ends,
        "model_max_length": length,
        **further,
    }


def _bert_tokenizer(length: int) -> dict[str, Any]:
    tokens = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    flags = {"do_lower_case": True, "clean_up_tokenization_spaces": True}
    return {"tokenizer_class": "BertTokenizer", **flags, **tokens, "model_max_length": length}


def _byte_pairs(size: int, *words: str) -> BaseTokenizer:
    """Returns a byte-level BPE tokenizer with made-up merges, which at GPT-2's size takes as long to load as
    GPT-2's.

    Each of ``words``, written with Ġ for a space, is one token. The last token is the end token.
    """
    vocab = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in (*words, *_words(size, "Ġ" + string.ascii_letters)):
        for left, joined in pairwise(accumulate(word)):
            if joined not in vocab and len(vocab) < size - 1:
                vocab[joined] = len(vocab)
                merges.append((left, joined[-1]))
    vocab[_END] = size - 1
    tokenizer = ByteLevelBPETokenizer(vocab, merges)
    tokenizer.add_special_tokens([_END])
    return tokenizer


def _word_pieces(size: int) -> BaseTokenizer:
    """Returns a WordPiece tokenizer with made-up words, laid out like BLIP's: BERT's uncased one, then [DEC] and
    [ENC]."""
    specials = {"[PAD]": _PADDING, "[UNK]": _UNKNOWN, "[CLS]": _CLS, "[SEP]": _SEP, "[MASK]": _MASK}
    specials |= {"[DEC]": size - 2, "[ENC]": size - 1}
    characters = string.ascii_lowercase + string.digits
    words = ((word, f"##{word}") for word in (*characters, *_words(size, string.ascii_lowercase)))
    pieces = [*(f"[unused{index}]" for index in range(1, _UNKNOWN)), *string.punctuation, *chain(*words)]
    free = (index for index in range(size) if index not in specials.values())
    tokenizer = BertWordPieceTokenizer(dict(specials) | dict(zip(pieces, free, strict=False)))
    tokenizer.add_special_tokens([*specials])
    return tokenizer


def _words(count: int, letters: str) -> Iterator[str]:
    """Yields made-up words of two letters, then of three, and so on."""
    words = (product(letters, *[letters.removeprefix("Ġ")] * length) for length in range(1, 5))
    return islice(("".join(word) for word in chain.from_iterable(words)), count)


RANDOM_MODELS = {
    # ViT-B/16 at 224 pixels and GPT-2 small with cross-attention: transformers' defaults.
    "vit-b16-gpt2": RandomModel(_vit_gpt2),
    # Salesforce/blip-image-captioning-base: ViT-B/16 at 384 pixels and a decoder of BERT-base's size.
    "blip-base": RandomModel(_blip),
    # microsoft/git-base-coco: CLIP's ViT-B/16 at 224 pixels and six layers of BERT-base's size.
    "git-base": RandomModel(_git),
    # florence-community/Florence-2-base: DaViT at 768 pixels and a BART of six layers each.
    "florence2-base": RandomModel(
        _florence2,
        text={"vocab_size": 51289, "d_model": 768, "max_position_embeddings": 1024}
        | {f"{part}_layers": 6 for part in ("encoder", "decoder")}
        | {f"{part}_attention_heads": 12 for part in ("encoder", "decoder")}
        | {f"{part}_ffn_dim": 3072 for part in ("encoder", "decoder")},
    ),
    # HuggingFaceTB/SmolVLM-256M-Instruct: SigLIP-B/16 at 512 pixels and thirty layers of SmolLM2's 135M.
    "smolvlm-256m": RandomModel(
        _smolvlm,
        {"image_size": 512, "patch_size": 16, "hidden_size": 768, "num_attention_heads": 12}
        | {"intermediate_size": 3072, "scale_factor": 4},
        {"vocab_size": 49280, "max_position_embeddings": 8192, "num_hidden_layers": 30, "hidden_size": 576}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536},
    ),
    # fancyfeast/llama-joycaption-beta-one-hf-llava: SigLIP-SO400M/14 at 384 pixels and Llama 3.1 8B.
    "llava-llama3-8b": RandomModel(
        _llava,
        {"image_size": 384, "patch_size": 14, "hidden_size": 1152, "num_attention_heads": 16}
        | {"num_hidden_layers": 27, "intermediate_size": 4304},
        {"vocab_size": 128256, "max_position_embeddings": 131072, "num_hidden_layers": 32, "hidden_size": 4096}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
    ),
    # Qwen/Qwen3-VL-2B-Instruct: its own encoder with DeepStack and Qwen3 1.7B.
    "qwen3-vl-2b": RandomModel(
        _qwen3_vl,
        {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}
        | {"deepstack_visual_indexes": [5, 11, 17]},
        {"vocab_size": 151936, "max_position_embeddings": 262144, "num_hidden_layers": 28, "hidden_size": 2048}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144},
    ),
}


@contextlib.contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to be filled, which gets its name at the end: it appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
        staging = Path(name) / folder.name
        staging.mkdir()
        yield staging
        staging.replace(folder)


def write_checkpoint(model: RandomModel, folder: Path) -> None:
    """Writes all files of a checkpoint."""
    with complete_folder(folder) as staging:
        captioner = model.describe()
        write_weights(captioner, model.dtype, staging)
        write_files(captioner, staging)


def write_files(captioner: Captioner, folder: Path) -> None:
    """Writes all files except the weights."""
    captioner.config.architectures = [captioner.architecture]
    config = captioner.config.to_dict()
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part.pop("dtype", None)
    generation = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, **captioner.special)
    files = {
        "config.json": config,
        "generation_config.json": generation.to_diff_dict(),
        "preprocessor_config.json": captioner.processor,
        "tokenizer_config.json": captioner.tokenizer_config,
    }
    if captioner.template:
        files["chat_template.json"] = {"chat_template": captioner.template}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    captioner.tokenizer.save(str(folder / "tokenizer.json"))


def write_weights(captioner: Captioner, dtype: str, folder: Path) -> None:
    """Fills transformers' model with random weights, and saves it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        # transformers' initial weights would take longer than `fill`, which replaces them.
        with initialization.no_init_weights():
            model = captioner.model()
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        fill(name, parameter.data, generator)
        for end, values in captioner.fixed.items():
            if name.endswith(end):
                for index, value in values.items():
                    parameter.data[index] = value
    model.save_pretrained(folder, max_shard_size="100GB")
    (folder / "model.safetensors").chmod(0o644)  # some versions make it readable for the owner alone


def fill(name: str, tensor: Any, generator: Any) -> None:
    """Fills norms with one, biases with zero, and all other tensors with random numbers."""
    if tensor.ndim == 1 and "class_embedding" not in name:
        tensor.fill_(float(name.endswith("weight")))
        return
    std = _POSITION_STD if _POSITIONS.search(name) else _CROSS_STD if "encoder_attn" in name else _MATRIX_STD
    tensor.normal_(0.0, std, generator=generator)


if __name__ == "__main__":
    write_checkpoint(RANDOM_MODELS[sys.argv[1]], Path(sys.argv[2]))
