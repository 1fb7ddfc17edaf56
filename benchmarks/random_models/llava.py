"""Describes LLaVA's tensors and files, as `LlavaForConditionalGeneration.save_pretrained` writes them.

They are JoyCaption's: SigLIP up to its last but one layer, two linear layers, and Llama 3.1.
"""

from collections.abc import Iterator

from snapcap.benchmarks.random_models import chat
from snapcap.benchmarks.random_models.chat import ChatShapes
from snapcap.benchmarks.random_models.tensors import Files, TensorSpec, linear, processor_config, vit_config

_LAYER = -2  # whose output the decoder sees


def tensors(shapes: ChatShapes) -> Iterator[TensorSpec]:
    yield from chat.siglip(shapes, "model.vision_tower.vision_model")
    yield from linear("model.multi_modal_projector.linear_1", shapes.text_width, shapes.width)
    yield from linear("model.multi_modal_projector.linear_2", shapes.text_width, shapes.text_width)
    yield from chat.llama(shapes, "model.language_model")


def files(shapes: ChatShapes) -> Files:
    vision = vit_config("siglip_vision_model", shapes, attention_dropout=0.0, layer_norm_eps=1e-6)
    lengths = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": min(8192, shapes.positions // 2),
    }
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, **lengths}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": chat.image_id(shapes),
        "image_seq_length": shapes.image_tokens,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_feature_layer": _LAYER,
        "vision_feature_select_strategy": "full",
        "vision_config": {**vision, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False},
        "text_config": chat.text_config(shapes, rope_parameters=rope, tie_word_embeddings=False),
    }
    processor = processor_config("SiglipImageProcessor", shapes, resample=3)
    return chat.files(shapes, config, processor, "<image><global-img>")  # a token stands between image and text
