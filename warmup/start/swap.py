"""Moves a serving bucket from eager to compiled: opens, compares on the running weights, and only then switches.

All of it runs on the device thread between two steps, on buffers of its own, so running rows notice nothing.
"""

import numpy as np
import torch
from torch import Tensor

from snapcap.models.regions.table import Component
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.runtime.backends.base import Backend
from snapcap.warmup.runtime.backends.eager import EagerBackend
from snapcap.warmup.runtime.compare import TOLERANCE, CheckError, relative_difference
from snapcap.warmup.runtime.devices.device import Pixels
from snapcap.warmup.runtime.runner import Callables, Runner, open_callables
from snapcap.warmup.runtime.slot_request import SlotRequest

CHECKED_STEPS = 3
# A whole component adds the rounding of all its layers to that of one region.
_LAYERS_FACTOR = 4.0


def swap_bucket(
    runner: Runner[Tensor], dtype: torch.dtype, component: Component, bucket: Bucket, backend: Backend
) -> None:
    """Serve a bucket of one component with this backend from now on.

    Raises:
        PackageError, InputSpecError: its packages cannot be opened.
        CheckError: its results are not the eager ones; the bucket stays as it is.
    """
    compiled = open_callables(runner.regions, component, bucket, backend)
    eager = open_callables(runner.regions, component, bucket, EagerBackend())
    check = check_encoder if component == "encoder" else check_decoder
    check(runner, dtype, bucket, compiled, eager)
    runner.bind(component, bucket, compiled)
    if runner.runs_ahead:
        runner.capture(component, bucket)


def check_encoder(
    runner: Runner[Tensor], dtype: torch.dtype, bucket: Bucket, compiled: Callables, eager: Callables
) -> None:
    """Encode random images, and texts where they are read, with both; compare the output and the caches written.

    Raises:
        CheckError: they differ by more than the dtype explains.
    """
    images, texts = _random_images(runner, bucket), _random_texts(runner, bucket)
    ours, theirs = runner.twin(), runner.twin()
    ours.bind("encoder", bucket, compiled)
    theirs.bind("encoder", bucket, eager)
    actual, expected = ours.encode(bucket, images, 0, texts), theirs.encode(bucket, images, 0, texts)
    _require_close("encoder output", actual, expected, dtype)
    own = ("key", "value") if runner.config.decoder.reads_prompt else ()
    for name in ("cross_key", "cross_value", *own):
        _require_close(name, _rows(ours, name, bucket), _rows(theirs, name, bucket), dtype)


def check_decoder(
    runner: Runner[Tensor], dtype: torch.dtype, bucket: Bucket, compiled: Callables, eager: Callables
) -> None:
    """Some steps over the same random prompts with both; compare the logits and the caches they leave.

    Raises:
        CheckError: they differ by more than the dtype explains.
    """
    ours, theirs = runner.twin(), runner.twin()
    ours.bind("decoder", bucket, compiled)
    theirs.bind("decoder", bucket, eager)
    # Drawn on the device, where they are needed: rows wait meanwhile, and a host would take seconds for large ones.
    generator = torch.Generator(runner.state.key.device).manual_seed(bucket.size)
    for name in ("cross_key", "cross_value"):
        drawn = _rows(ours, name, bucket).normal_(generator=generator)
        _rows(theirs, name, bucket).copy_(drawn)
    steps = min(CHECKED_STEPS, runner.state.cache_length - 1)
    numbers = np.random.default_rng(bucket.size)
    prompts = numbers.integers(0, runner.config.decoder.vocab_size, (bucket.size, steps)).tolist()
    start_id = runner.config.generation.start_id
    texts = [row.read(start_id) for row in _random_texts(runner, bucket)]
    for twin in (ours, theirs):
        twin.state.write_texts(range(len(texts)), texts)  # a step may read where each ends
        twin.admit(0, [SlotRequest(prompt) for prompt in prompts])
    for _ in range(steps):
        _require_close("logits", ours.decode_step(bucket), theirs.decode_step(bucket), dtype)
    for name in ("key", "value"):
        _require_close(name, _rows(ours, name, bucket), _rows(theirs, name, bucket), dtype)
    if not torch.equal(ours.state.positions, theirs.state.positions):
        raise CheckError("positions differ")


def _rows(runner: Runner[Tensor], cache: str, bucket: Bucket) -> Tensor:
    """A cache's rows of a bucket, in every layer."""
    rows: Tensor = getattr(runner.state, cache)[:, : bucket.size]
    return rows


def _random_images(runner: Runner[Tensor], bucket: Bucket) -> list[Pixels]:
    generator = np.random.default_rng(bucket.size)
    shape = (*runner.config.vision.image_size, 3)
    return [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(bucket.size)]


def _random_texts(runner: Runner[Tensor], bucket: Bucket) -> list[SlotRequest]:
    """Texts of several lengths for an encode to read; none for a model whose encode reads none."""
    decoder = runner.config.decoder
    longest = min(decoder.text_tokens, runner.state.cache_length - 2)
    if longest < 1:
        return []
    generator = np.random.default_rng(bucket.size)
    texts = [
        generator.integers(0, decoder.vocab_size, length).tolist()
        for length in generator.integers(1, longest + 1, bucket.size)
    ]
    if decoder.reads_prompt:
        return [SlotRequest(text, prefilled=len(text)) for text in texts]
    return [SlotRequest(text=text) for text in texts]


def _require_close(name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    difference, allowed = relative_difference(actual, expected), TOLERANCE[dtype] * _LAYERS_FACTOR
    if difference > allowed:
        raise CheckError(f"{name} differ by {difference:.1e}, more than {allowed:.0e}")
