"""From a checkpoint on disk to a runner whose every bucket has run once."""

import io
import time

import numpy as np
import torch
from PIL import Image

from models.kv_cache import DecodeState
from models.regions import build_regions
from models.weights import Normalisation, load_weights
from warmup.backends.eager import EagerBackend
from warmup.buckets import BucketTable
from warmup.device import StartError, choose_device, choose_dtype, configure
from warmup.options import StartOptions
from warmup.row import Row
from warmup.runner import Runner
from warmup.startup import Checkpoint
from warmup.status import StartupStatus
from warmup.timeline import Timeline

DEFAULT_BUCKETS = {"cuda": (1, 4, 16, 64), "cpu": (1, 4, 8)}
DEFAULT_CACHE_LENGTH = 64
SELF_TEST_TOKENS = 8


def warm_runner(checkpoint: Checkpoint, options: StartOptions, timeline: Timeline, status: StartupStatus) -> Runner:
    """Load the weights, warm every bucket through the serving callables and caption one image.

    Raises:
        StartError: a setting does not fit the model or the machine, or the self-test fails.
        WeightsError: the weights cannot be read or do not fit the configuration.
    """
    with timeline.phase("device_init"):
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        configure(device, options.threads)
        table = BucketTable.of(options.buckets or DEFAULT_BUCKETS[device.type])
        length = cache_length(checkpoint, options)
        state = DecodeState.allocate(checkpoint.config, table.largest.size, length, device, dtype)
    with timeline.phase("load_weights"):
        transform = checkpoint.transform
        normalisation = Normalisation(
            transform.effective_rescale, transform.effective_mean, transform.effective_std
        )
        weights = load_weights(checkpoint.folder, checkpoint.config, normalisation, device, dtype)
    backend = EagerBackend()
    runner = Runner(checkpoint.config, build_regions(checkpoint.config), weights, state, table)
    status.expect(table.sizes)
    for bucket in table.buckets:
        runner.use_encoder(bucket, backend)
        runner.use_decoder(bucket, backend)
    warm(runner, backend.name, timeline, status)
    with timeline.phase("self_test"):
        self_test(runner, checkpoint)
    status.serve_with(backend.name, str(device), str(dtype).removeprefix("torch."))
    return runner


def cache_length(checkpoint: Checkpoint, options: StartOptions) -> int:
    """Positions a row's cache holds: as set, or room for the model's default length and a prompt.

    Raises:
        StartError: more than the model has positions, or fewer than two.
    """
    generation, positions = checkpoint.config.generation, checkpoint.config.decoder.n_positions
    length = options.cache_length or min(
        positions, max(DEFAULT_CACHE_LENGTH, generation.max_length, options.max_new_tokens + 1)
    )
    if not 2 <= length <= positions:
        raise StartError(f"cache_length {length}: this model has positions for 2 to {positions} tokens")
    return length


def warm(runner: Runner, backend: str, timeline: Timeline, status: StartupStatus) -> None:
    """Run every bucket once through the callables that serve, smallest first: a lone request is the rule."""
    height, width = runner.config.vision.image_size
    blank = np.zeros((height, width, 3), dtype=np.uint8)
    with timeline.phase("warm_encoder"):
        for bucket in runner.table.buckets:
            started = time.perf_counter()
            runner.encode(bucket, [blank] * bucket.size, 0)
            _wait(runner)
            status.update("encoder", bucket.size, "eager", backend, time.perf_counter() - started)
    with timeline.phase("warm_decoder"):
        for bucket in runner.table.buckets:
            started = time.perf_counter()
            for slot in range(bucket.size):
                runner.admit(slot, Row())
            runner.decode_step(bucket)
            _wait(runner)
            status.update("decoder", bucket.size, "eager", backend, time.perf_counter() - started)


def self_test(runner: Runner, checkpoint: Checkpoint) -> str:
    """Caption one built-in image, from PNG bytes to text, as a request would be.

    Raises:
        StartError: the logits are not finite: weights or device are damaged.
    """
    pixels = checkpoint.transform.decode(built_in_image(checkpoint.config.vision.image_size)).pixels
    bucket = runner.table.buckets[0]
    runner.encode(bucket, [pixels], 0)
    runner.admit(0, Row())
    tokens: list[int] = []
    while len(tokens) < min(SELF_TEST_TOKENS, runner.state.cache_length - 1):
        logits = runner.decode_step(bucket)
        if not torch.isfinite(logits[0]).all():
            raise StartError("the self-test's logits are not finite: the weights or the device are damaged")
        tokens += runner.tokens(1)
        if tokens[-1] in checkpoint.config.generation.eos_ids:
            break
    return checkpoint.tokenizer.decode(tokens)


def built_in_image(size: tuple[int, int]) -> bytes:
    """A PNG of (height, width) with a bright disc on a gradient."""
    height, width = size
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([x * 255 // width, y * 255 // height, 128 + 0 * x], axis=-1).astype(np.uint8)
    disc = (y - height / 2) ** 2 + (x - width / 2) ** 2 < (min(size) / 4) ** 2
    picture[disc] = (250, 220, 40)
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "PNG")
    return stream.getvalue()


def _wait(runner: Runner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
