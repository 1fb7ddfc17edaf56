"""Makes random transformers captioners of every family, small enough for a test."""

from typing import Any, Literal

import torch
import transformers
from support.checkpoints import chat_files

VISION = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 96,
    "patch_size": 16,
}
TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
START, END, PADDING = 3, 2, 0
# Scaling of rotary positions that already matters in a cache as short as a test's.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Stages of 24×24, 12×12 and 6×6 tokens; windows of 4 fit the first two alone.
DAVIT = {
    "depths": [1, 2, 1],
    "patch_size": [7, 3, 3],
    "patch_stride": [4, 2, 2],
    "patch_padding": [3, 1, 1],
    "patch_prenorm": [False, True, True],
    "embed_dim": [16, 32, 48],
    "num_heads": [2, 4, 3],
    "num_groups": [2, 4, 3],
    "window_size": 4,
    "projection_dim": 40,
    "image_size": 96,
}
BART = {
    "vocab_size": 97,
    "d_model": 40,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 5,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 96,
}


def blip(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """`BlipForConditionalGeneration`."""
    specials = {"bos_token_id": 95, "sep_token_id": END, "eos_token_id": END, "pad_token_id": PADDING}
    config = transformers.BlipConfig(
        vision_config=VISION | (vision or {}), text_config=TEXT | specials | (text or {})
    )
    torch.manual_seed(seed)
    return enlivened(transformers.BlipForConditionalGeneration(config))


def git(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """`GitForCausalLM`."""
    specials = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PADDING}
    config = transformers.GitConfig(vision_config=VISION | (vision or {}), **TEXT | specials | (text or {}))
    torch.manual_seed(seed)
    return enlivened(transformers.GitForCausalLM(config))


def smolvlm(
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    seed: int = 0,
    *,
    idefics3: bool = False,
    **config: Any,
) -> Any:
    """`SmolVLMForConditionalGeneration`, or Idefics3's, for the files that `chat_files.write_chat_files` writes."""
    kind = "Idefics3" if idefics3 else "SmolVLM"
    shapes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    shapes |= {"intermediate_size": 80, "max_position_embeddings": 128, "vocab_size": 328, "model_type": "llama"}
    specials = {
        "bos_token_id": chat_files.START,
        "eos_token_id": chat_files.END,
        "pad_token_id": chat_files.PADDING,
    }
    fields = {"image_token_id": chat_files.IMAGE, "scale_factor": 2, **config}
    configuration = getattr(transformers, f"{kind}Config")(
        vision_config=VISION | (vision or {}), text_config=shapes | specials | (text or {}), **fields
    )
    torch.manual_seed(seed)
    model = enlivened(getattr(transformers, f"{kind}ForConditionalGeneration")(configuration))
    model.generation_config.eos_token_id = [chat_files.END_OF_UTTERANCE]
    model.generation_config.bos_token_id = chat_files.START
    model.generation_config.pad_token_id = chat_files.PADDING
    return model


def llava(
    tower: Literal["CLIP", "Siglip"] = "CLIP",
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    seed: int = 0,
    **config: Any,
) -> Any:
    """`LlavaForConditionalGeneration` with CLIP's or SigLIP's tower, for the files that `write_chat_files` writes
    with `chat_files.LLAVA_TEMPLATE`."""
    shapes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    shapes |= {"intermediate_size": 80, "max_position_embeddings": 160, "vocab_size": 328}
    specials = {
        "bos_token_id": chat_files.START,
        "eos_token_id": chat_files.END,
        "pad_token_id": chat_files.PADDING,
    }
    configuration = transformers.LlavaConfig(
        vision_config=getattr(transformers, f"{tower}VisionConfig")(
            **VISION | {"num_hidden_layers": 3} | (vision or {})
        ),
        text_config=transformers.LlamaConfig(**shapes | specials | (text or {})),
        image_token_index=chat_files.IMAGE,
        **config,
    )
    torch.manual_seed(seed)
    model = enlivened(transformers.LlavaForConditionalGeneration(configuration))
    with torch.no_grad():  # no norm bounds the image's tokens, and in large ones rounding shows
        model.model.multi_modal_projector.linear_2.weight.mul_(0.05)
    model.generation_config.eos_token_id = [chat_files.END_OF_UTTERANCE]
    model.generation_config.bos_token_id = chat_files.START
    model.generation_config.pad_token_id = chat_files.PADDING
    return model


def pair(encoder: Any, decoder: Any, seed: int = 0) -> Any:
    """`VisionEncoderDecoderModel` of two configurations."""
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    torch.manual_seed(seed)
    model = enlivened(transformers.VisionEncoderDecoderModel(config))
    settings = {"decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": PADDING, "max_length": 20}
    for field, value in settings.items():
        setattr(model.generation_config, field, value)
    return model


def enlivened(model: Any) -> Any:
    """Weights larger than transformers' initial ones: attention is not flat, tokens vary, no bias is zero and no
    two positions are alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position" in name or "wpe" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            elif "norm" in name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(6)
            elif "embed" not in name or parameter.dim() != 2:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def florence2(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """`Florence2ForConditionalGeneration`, with the generation settings of those on the hub but for the end."""
    config = transformers.Florence2Config(
        vision_config=transformers.Florence2VisionConfig(**DAVIT | (vision or {})),
        text_config=transformers.BartConfig(**BART | (text or {})),
        image_token_id=(BART | (text or {}))["vocab_size"] - 1,
    )
    torch.manual_seed(seed)
    model = enlivened(transformers.Florence2ForConditionalGeneration(config))
    settings = {
        "decoder_start_token_id": 2,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "num_beams": 3,
        "no_repeat_ngram_size": 3,
        "early_stopping": True,
    }
    for field, value in settings.items():
        setattr(model.generation_config, field, value)
    return model
