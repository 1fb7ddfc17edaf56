"""Runs beam searches over a runner without an engine, groups of rows in one bucket; and those of transformers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from support.checkpoints.qwen3_vl_files import VISION_END, packed_inputs
from support.parity.parity import pixel_values
from support.parity.references import chat_pixels, chat_prompt, florence2_ids

from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import Needs, SlotRequest


def needs_of(rows: Sequence[SlotRequest]) -> Needs:
    """Returns the needs of a step over these rows."""
    return Needs(
        any(row.params.samples for row in rows),
        any(row.params.penalised for row in rows),
        any(row.params.searches for row in rows),
    )


def place(
    runner: Runner, table: BucketTable, asked: Sequence[tuple[np.ndarray, SlotRequest]], first: int = 0
) -> list[int]:
    """Encode and admit requests from a slot on: first one row each, then the others of each group.

    Returns, for each slot, the number of the request in it.
    """
    images, rows = [image for image, _ in asked], [row for _, row in asked]
    runner.encode(table.fit(len(asked)), images, first, rows)
    runner.admit(first, rows)
    owners = list(range(len(asked)))
    for number, row in enumerate(rows):
        if row.params.searches:
            others = range(first + len(owners), first + len(owners) + row.params.num_beams - 1)
            owners += [number] * len(others)
            runner.group([first + number, *others], row)
    return owners


@torch.no_grad()
def search(
    runner: Runner, table: BucketTable, asked: Sequence[tuple[np.ndarray, SlotRequest]], steps: int
) -> list[list[int]]:
    """Tokens of each request, all in one bucket: a search's best hypothesis without start and prompt, with its end;
    of other rows ``steps`` tokens less the prompt."""
    owners = place(runner, table, asked)
    needs, bucket = needs_of([row for _, row in asked]), table.fit(len(owners))
    tokens: list[list[int]] = [[] for _ in asked]
    ended: dict[int, list[int]] = {}
    for _ in range(steps):
        runner.decode_step(bucket, needs)
        pending = runner.read_tokens(len(owners), needs.beams)
        for number, token in enumerate(pending.result()[: len(asked)]):
            tokens[number].append(token)
        for slot, hypothesis in pending.hypotheses().items():
            ended.setdefault(owners[slot], hypothesis)
    return [
        ended[number][1 + len(row.prompt) :]
        if row.params.searches
        else tokens[number][len(row.prompt) - row.prefilled :]
        for number, (_, row) in enumerate(asked)
    ]


def settings(row: SlotRequest, new_tokens: int) -> dict[str, Any]:
    """Returns a row's options by transformers' names."""
    common = {
        "no_repeat_ngram_size": row.params.no_repeat_ngram_size,
        "repetition_penalty": row.params.repetition_penalty,
        "max_new_tokens": row.new_tokens if row.params.searches else new_tokens,
        "do_sample": False,
    }
    if not row.params.searches:
        return common
    return common | {
        "num_beams": row.params.num_beams,
        "length_penalty": row.params.length_penalty,
        "early_stopping": row.params.early_stopping,
    }


def pair_reference(model: Any, image: np.ndarray, row: SlotRequest, new_tokens: int = 12, **more: Any) -> list[int]:
    """Returns the tokens that a `VisionEncoderDecoderModel` generates after the prompt, with the end token."""
    start = torch.tensor([[model.generation_config.decoder_start_token_id, *row.prompt]], device=model.device)
    output = model.generate(
        pixel_values([image]).to(model.device), decoder_input_ids=start, **settings(row, new_tokens), **more
    )
    return output[0, start.shape[1] :].tolist()


def git_reference(model: Any, image: np.ndarray, row: SlotRequest, new_tokens: int = 12) -> list[int]:
    """Returns the tokens that a `GitForCausalLM` generates after the prompt, with the end token."""
    start = torch.tensor([[model.generation_config.bos_token_id, *row.prompt]])
    output = model.generate(pixel_values=pixel_values([image]), input_ids=start, **settings(row, new_tokens))
    return output[0, start.shape[1] :].tolist()


def chat_reference(model: Any, image: np.ndarray, row: SlotRequest, new_tokens: int = 12, **more: Any) -> list[int]:
    """Returns the tokens that a SmolVLM or LLaVA generates after the prompt, with the end token."""
    ids = torch.tensor([[*chat_prompt(model), *row.prompt]], device=model.device)
    pixels = chat_pixels(model, [image]).to(model.device)
    output = model.generate(pixel_values=pixels, input_ids=ids, **settings(row, new_tokens), **more)
    return output[0, ids.shape[1] :].tolist()


def qwen3_vl_reference(
    model: Any, image: np.ndarray, row: SlotRequest, new_tokens: int = 12, **more: Any
) -> list[int]:
    """Returns the tokens that a `Qwen3VLForConditionalGeneration` generates after the prompt, with the end token.
    The picture is packed."""
    given = packed_inputs(model, [image], (VISION_END, *row.prompt))
    output = model.generate(**given, **settings(row, new_tokens), **more)
    return output[0, given["input_ids"].shape[1] :].tolist()


def blip_reference(model: Any, image: np.ndarray, row: SlotRequest, new_tokens: int = 12) -> list[int]:
    """Returns the tokens that a `BlipForConditionalGeneration` generates after the prompt, with the end token."""
    ids = torch.tensor([[1, *row.prompt, 2]]) if row.prompt else None
    output = model.generate(pixel_values([image]), input_ids=ids, **settings(row, new_tokens))
    return output[0, 1 + len(row.prompt) :].tolist()


def florence2_reference(model: Any, image: np.ndarray, row: SlotRequest, new_tokens: int = 12) -> list[int]:
    """Returns the tokens that a `Florence2ForConditionalGeneration` generates after the prompt, with the end token.
    The encoder reads the row's text behind the image."""
    start = torch.tensor([[model.generation_config.decoder_start_token_id, *row.prompt]], device=model.device)
    output = model.generate(
        input_ids=florence2_ids(model, [row.text]),
        pixel_values=pixel_values([image]).to(model.device),
        decoder_input_ids=start,
        **{"num_beams": 1, "early_stopping": False, **settings(row, new_tokens)},
    )
    return output[0, start.shape[1] :].tolist()
