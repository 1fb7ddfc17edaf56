"""Describes SmolVLM's tensors and files, as `Idefics3ForConditionalGeneration.save_pretrained` writes them."""

from collections.abc import Iterator

from snapcap.benchmarks.random_models import chat
from snapcap.benchmarks.random_models.chat import ChatShapes
from snapcap.benchmarks.random_models.tensors import MATRIX_STD, Files, TensorSpec, processor_config, vit_config


def tensors(shapes: ChatShapes) -> Iterator[TensorSpec]:
    yield from chat.siglip(shapes, "model.vision_model")
    square = shapes.pixel_shuffle**2 * shapes.width
    yield TensorSpec("model.connector.modality_projection.proj.weight", (shapes.text_width, square), MATRIX_STD)
    yield from chat.llama(shapes, "model.text_model")


def files(shapes: ChatShapes) -> Files:
    vision = vit_config("idefics3_vision", shapes, attention_dropout=0.0, layer_norm_eps=1e-6)
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": chat.image_id(shapes),
        "scale_factor": shapes.pixel_shuffle,
        "tie_word_embeddings": False,
        "vision_config": {**vision, "hidden_act": "gelu_pytorch_tanh"},
        "text_config": chat.text_config(shapes, rope_parameters=rope),
    }
    processor = {
        **processor_config("Idefics3ImageProcessor", shapes, do_convert_rgb=True, do_pad=True, resample=1),
        "do_image_splitting": True,
        "size": {"longest_edge": 4 * shapes.image_size},
        "max_image_size": {"longest_edge": shapes.image_size},
    }
    return chat.files(shapes, config, processor)
