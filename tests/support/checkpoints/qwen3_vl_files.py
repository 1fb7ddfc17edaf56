"""Writes a Qwen3-VL checkpoint's files beside its weights, makes pictures, and asks transformers' model of them."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from PIL import Image
from support.checkpoints import random_captioners
from support.checkpoints.tokenizer_cases import byte_level_bpe
from support.parity.parity import NORMALISATION
from support.parity.pictures import scene

from snapcap.models.processing.packed import grid_of, pack
from snapcap.models.processing.resample import Pixels

# The part of `Qwen/Qwen3-VL-2B-Instruct`'s template that renders text, pictures and videos, without tools.
TEMPLATE = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].content is string %}
        {{- messages[0].content }}
    {%- else %}
        {%- for content in messages[0].content %}
            {%- if 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set image_count = namespace(value=0) %}
{%- set video_count = namespace(value=0) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for content in message.content %}
                {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                    {%- set image_count.value = image_count.value + 1 %}
                    {%- if add_vision_id %}Picture {{ image_count.value }}: {% endif -%}
                    <|vision_start|><|image_pad|><|vision_end|>
                {%- elif content.type == 'video' or 'video' in content %}
                    {%- set video_count.value = video_count.value + 1 %}
                    {%- if add_vision_id %}Video {{ video_count.value }}: {% endif -%}
                    <|vision_start|><|video_pad|><|vision_end|>
                {%- elif 'text' in content %}
                    {{- content.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {{- message.content }}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
    "<|vision_pad|>",
)
END, VISION_START, IMAGE, VISION_END, VIDEO = 2, 3, 4, 5, 6
# The least and the greatest area of a picture: from 4 tokens to 100.
LEAST, MOST = 4 * 1024, 100 * 1024
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": LEAST, "longest_edge": MOST},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "rescale_factor": NORMALISATION.rescale,
    "image_mean": [*NORMALISATION.mean],
    "image_std": [*NORMALISATION.std],
}


@cache
def tokenizer() -> tokenizers.Tokenizer:
    return byte_level_bpe(["Can you describe this image?", "user\nassistant\n"], list(SPECIALS))


@cache
def prefix() -> tuple[int, ...]:
    """Returns the ids that the template puts right before a picture's tokens."""
    return tuple(tokenizer().encode("<|vision_start|>").ids)


def write_files(folder: Path, most: int = MOST) -> int:
    """Writes tokenizer, template and the image processor's file. Returns the number of tokens. ``most``: the
    greatest area of a picture."""
    backend = tokenizer()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GPT2TokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**PROCESSOR, "size": {"shortest_edge": LEAST, "longest_edge": most}})
    )
    return int(backend.get_vocab_size())


def written(model: Any, folder: Path, most: int = MOST) -> Path:
    model.save_pretrained(folder)
    assert write_files(folder, most) <= model.config.text_config.vocab_size
    return folder


def qwen3_vl(
    vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, seed: int = 0, **config: Any
) -> Any:
    """`Qwen3VLForConditionalGeneration` for the files that `write_files` writes."""
    import transformers

    tower = {"depth": 4, "hidden_size": 48, "num_heads": 3, "intermediate_size": 96, "out_hidden_size": 40}
    tower |= {"num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]}
    shapes = {"hidden_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2}
    shapes |= {"head_dim": 16, "intermediate_size": 80, "max_position_embeddings": 512, "vocab_size": 328}
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    specials = {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": 0}
    configuration = transformers.Qwen3VLConfig(
        vision_config=tower | (vision or {}),
        text_config=shapes | {"rope_parameters": rope} | specials | (text or {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        **config,
    )
    torch.manual_seed(seed)
    model = random_captioners.enlivened(transformers.Qwen3VLForConditionalGeneration(configuration))
    with torch.no_grad():
        visual = model.model.visual
        visual.pos_embed.weight.normal_(0, 0.5)
        visual.patch_embed.proj.weight.normal_(0, 0.05)
        for merger in (visual.merger, *visual.deepstack_merger_list):  # in large features rounding shows
            merger.linear_fc2.weight.mul_(0.2)
    model.generation_config.eos_token_id = [END]
    model.generation_config.pad_token_id = 0
    return model


def picture(rows: int, columns: int, seed: int = 0) -> Image.Image:
    """A picture that becomes a grid of so many tokens."""
    return scene(32 * columns, 32 * rows, seed)


def packed(pictures: Sequence[Image.Image], tokens: int) -> list[np.ndarray]:
    """Returns the pictures as our encoder takes them, with room for ``tokens`` tokens."""
    arrays = [pack(Pixels(each.size, each.tobytes()), tokens) for each in pictures]
    return [np.frombuffer(each.data, np.uint8).reshape(each.size[1], each.size[0], 3).copy() for each in arrays]


def model_inputs(image: Image.Image, before: Sequence[int], after: Sequence[int]) -> dict[str, torch.Tensor]:
    """Returns the inputs of transformers' model for a picture between the ids of a text."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    fields = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
    given = Qwen2VLImageProcessorPil(**fields)(image, return_tensors="pt")
    count = int(given["image_grid_thw"].prod()) // 4
    ids = torch.tensor([[*before, *[IMAGE] * count, *after]])
    return {**given, "input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}


def packed_inputs(model: Any, images: Sequence[np.ndarray], after: Sequence[int]) -> dict[str, torch.Tensor]:
    """Returns the inputs of transformers' model, on its device, for packed pictures of one shape between the
    template's prefix and the ids of a text."""
    rows, columns = grid_of(images[0])
    pixels = torch.from_numpy(np.stack([image[: rows * columns] for image in images])).float()
    pixels = (pixels * NORMALISATION.rescale - torch.tensor(NORMALISATION.mean)) / torch.tensor(NORMALISATION.std)
    # A token's 2 × 2 patches, each with its channels first, and as two equal frames.
    patches = pixels.view(-1, 2, 16, 2, 16, 3).permute(0, 1, 3, 5, 2, 4).unsqueeze(4).repeat(1, 1, 1, 1, 2, 1, 1)
    ids = torch.tensor([[*prefix(), *[IMAGE] * (rows * columns), *after]] * len(images))
    given = {
        "pixel_values": patches.reshape(-1, 1536),
        "image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns]] * len(images)),
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    return {name: value.to(model.device) for name, value in given.items()}


def generated(
    model: Any, image: Image.Image, before: Sequence[int], after: Sequence[int], count: int, **settings: Any
) -> tuple[list[int], tuple[torch.Tensor, ...]]:
    """Returns the tokens that transformers' model generates, and the logits of each step."""
    given = model_inputs(image, before, after)
    settings = {"max_new_tokens": count, "do_sample": False, "output_logits": True, **settings}
    output = model.generate(**given, **settings, return_dict_in_generate=True)
    return output.sequences[0, given["input_ids"].shape[1] :].tolist(), output.logits
