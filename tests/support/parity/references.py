"""Generates with transformers' models: greedy tokens that never stop, without the start token, and their logits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from support.checkpoints import chat_files, qwen3_vl_files
from support.parity.parity import pixel_values

from snapcap.models.processing.packed import grid_of

Generated = tuple[list[list[int]], tuple[torch.Tensor, ...]]


def generated_by_pair(model: Any, images: list[np.ndarray], steps: int, prompt: tuple[int, ...] = ()) -> Generated:
    """A `VisionEncoderDecoderModel`'s, on the device it is on; a prompt follows the start token."""
    start = model.generation_config.decoder_start_token_id
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[start, *prompt]] * len(images), device=model.device)
    return _generate(model, images, steps - len(prompt), decoder_input_ids=ids)


def generated_by_blip(model: Any, images: list[np.ndarray], steps: int, prompt: tuple[int, ...] = ()) -> Generated:
    """A `BlipForConditionalGeneration`'s; a prompt is given as BlipProcessor gives it, between [CLS] and [SEP]."""
    model.config.text_config.sep_token_id = None  # no end
    model.text_decoder.generation_config.eos_token_id = None
    ids = torch.tensor([[1, *prompt, 2]] * len(images), device=model.device) if prompt else None
    return _generate(model, images, steps - len(prompt), input_ids=ids)


def generated_by_git(model: Any, images: list[np.ndarray], steps: int, prompt: tuple[int, ...] = ()) -> Generated:
    """A `GitForCausalLM`'s; a prompt is given as its documentation gives it, after the start token.

    Without a cache: with one transformers 5.17 counts the image's tokens into the positions of the text, from the
    second token on, as earlier and later versions do not.
    """
    model.generation_config.eos_token_id = None  # no end
    start = model.generation_config.bos_token_id
    ids = torch.tensor([[start, *prompt]] * len(images), device=model.device) if prompt else None
    model.generation_config.use_cache = False
    return _generate(model, images, steps - len(prompt), input_ids=ids)


def generated_by_chat(model: Any, images: list[np.ndarray], steps: int, prompt: tuple[int, ...] = ()) -> Generated:
    """A SmolVLM's or LLaVA's, after `chat_prompt`; a prompt follows it."""
    model.generation_config.eos_token_id = None  # no end
    before = chat_prompt(model)
    ids = torch.tensor([[*before, *prompt]] * len(images), device=model.device)
    tokens, logits = _generate(model, images, steps - len(prompt), chat_pixels(model, images), input_ids=ids)
    return [row[len(before) - 1 :] for row in tokens], logits


def chat_prompt(model: Any) -> tuple[int, ...]:
    """The ids of `chat_files`' template for the model up to a message's text."""
    config = model.config
    side = config.vision_config.image_size // config.vision_config.patch_size
    if config.model_type == "llava":
        first = config.vision_config.model_type == "clip_vision_model"
        image = side**2 + first - (config.vision_feature_select_strategy == "default")
        return (*chat_files.LLAVA_PREFIX, *[chat_files.IMAGE] * image, chat_files.LLAVA_START)
    image = (side // config.scale_factor) ** 2
    return (*chat_files.PREFIX, *[chat_files.IMAGE] * image, chat_files.PREFIX[-2])


def chat_pixels(model: Any, images: list[np.ndarray]) -> torch.Tensor:
    """Returns the images as the model takes them: a model with tiles gets one tile of each image."""
    pixels = pixel_values(images)
    return pixels if model.config.model_type == "llava" else pixels.unsqueeze(1)


def generated_by_qwen3_vl(
    model: Any, images: list[np.ndarray], steps: int, prompt: tuple[int, ...] = ()
) -> Generated:
    """A `Qwen3VLForConditionalGeneration`'s for packed pictures, those of one shape together; a prompt follows the
    template's token behind the image."""
    model.generation_config.eos_token_id = None  # no end
    tokens: dict[int, list[int]] = {}
    logits: dict[int, torch.Tensor] = {}
    for grid in {grid_of(image) for image in images}:
        places = [place for place, image in enumerate(images) if grid_of(image) == grid]
        after = (qwen3_vl_files.VISION_END, *prompt)
        given = qwen3_vl_files.packed_inputs(model, [images[place] for place in places], after)
        before = given["input_ids"].shape[1] - len(prompt)
        found, scores = _generate(model, [], steps - len(prompt), given.pop("pixel_values"), **given)
        tokens |= {place: row[before - 1 :] for place, row in zip(places, found, strict=True)}
        logits |= dict(zip(places, torch.stack(scores, dim=1), strict=True))
    every = range(len(images))
    return [tokens[place] for place in every], torch.stack([logits[place] for place in every], dim=1).unbind(0)


def generated_by_florence2(
    model: Any, images: list[np.ndarray], steps: int, prompt: tuple[int, ...] = (), text: tuple[int, ...] = ()
) -> Generated:
    """A `Florence2ForConditionalGeneration`'s, greedy and with nothing forced but the first token where no prompt
    is; ``text`` is what the encoder reads behind each image."""
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    given: dict[str, Any] = {"input_ids": florence2_ids(model, [text] * len(images))}
    if prompt:
        start = [model.generation_config.decoder_start_token_id, *prompt]
        given["decoder_input_ids"] = torch.tensor([start] * len(images), device=model.device)
    greedy = {"num_beams": 1, "no_repeat_ngram_size": 0, "early_stopping": False}
    return _generate(model, images, steps - len(prompt), **given, **greedy)


def florence2_ids(model: Any, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """The image's tokens and texts of one length, as Florence2Processor gives them."""
    config = model.config.vision_config
    side = config.image_size
    for stride in config.patch_stride:
        side = -(-side // stride)
    image = [model.config.image_token_id] * (side * side + 1)
    return torch.tensor([[*image, *text] for text in texts], device=model.device)


def _generate(
    model: Any,
    images: list[np.ndarray],
    count: int,
    pixels: torch.Tensor | None = None,
    **ids: Any,
) -> Generated:
    pixels = pixel_values(images) if pixels is None else pixels
    output = model.generate(
        pixel_values=pixels.to(model.device, model.dtype),
        **ids,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[:, 1:].tolist(), output.logits
