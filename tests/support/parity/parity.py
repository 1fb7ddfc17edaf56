"""Runs our regions on a checkpoint folder, and compares them with transformers for the tests of every family."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snapcap.models.config import ModelConfig
from snapcap.models.memory.torch_memory import torch_memory
from snapcap.models.processing.transform import Normalisation
from snapcap.models.regions.state import DecodeState
from snapcap.models.regions.table import Weights, build_regions
from snapcap.models.weights.load import load_weights
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.progress.status import COMPONENTS
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Runner, open_callables
from snapcap.warmup.runtime.slot_request import SlotRequest
from snapcap.warmup.runtime.torch_model import LoadedModel, torch_device

Reference = Callable[[list[np.ndarray], int], tuple[list[list[int]], tuple[torch.Tensor, ...]]]

TABLE = BucketTable.of((1, 2, 5))
NORMALISATION = Normalisation(1 / 255, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))


def weight_bytes(weights: Weights[torch.Tensor]) -> int:
    """Returns the bytes of all weights. A tied tensor counts once."""
    unique = {t.data_ptr(): t.nbytes for layers in weights.sets.values() for layer in layers for t in layer}
    return sum(unique.values())


def build_runner(folder: Path, table: BucketTable = TABLE, cache_length: int = 48) -> Runner:
    """Eager, fp32, on the CPU, with every bucket bound."""
    config = ModelConfig.from_folder(folder)
    cpu = torch.device("cpu")
    weights = load_weights(folder, config, NORMALISATION, cpu, torch.float32)
    state = DecodeState.allocate(config, table.largest.size, cache_length, torch_memory(cpu), "float32")
    runner = Runner(LoadedModel(config, build_regions(config), weights, state), torch_device(cpu))
    for bucket in table.buckets:
        for component in COMPONENTS:
            runner.bind(component, bucket, open_callables(runner.regions, component, bucket, EagerBackend()))
    return runner


def random_images(config: ModelConfig, count: int, seed: int = 3) -> list[np.ndarray]:
    """Noise of another colour in each image, and in each quarter of it."""
    generator = np.random.default_rng(seed)
    height, width = config.vision.image_size
    images = []
    for _ in range(count):
        quarters = generator.integers(0, 200, (2, 2, 3)).repeat(height // 2 + 1, 0).repeat(width // 2 + 1, 1)
        noise = generator.integers(0, 56, (height, width, 3))
        images.append((quarters[:height, :width] + noise).astype(np.uint8))
    return images


def pixel_values(images: list[np.ndarray]) -> torch.Tensor:
    """Returns the images as transformers' model takes them."""
    pixels = torch.from_numpy(np.stack(images)).float() * NORMALISATION.rescale
    return ((pixels - torch.tensor(NORMALISATION.mean)) / torch.tensor(NORMALISATION.std)).permute(0, 3, 1, 2)


def generate(
    runner: Runner,
    images: list[np.ndarray],
    steps: int,
    prompt: tuple[int, ...] = (),
    table: BucketTable = TABLE,
    logits: list[torch.Tensor] | None = None,
    texts: Sequence[Sequence[int]] = (),
    prefilled: int = 0,
) -> np.ndarray:
    """Tokens [images, steps] that follow the start token, all images in one bucket from the first slot.

    ``logits`` is added to: [images, vocabulary] a step. ``texts``: what the encoder reads beside each image.
    ``prefilled``: so many of the start token and the prompt are read with the image, and take no step.
    """
    bucket = table.fit(len(images))
    rows = [SlotRequest(prompt, text=text, prefilled=prefilled) for text in texts or [()] * len(images)]
    runner.encode(bucket, images, 0, rows)
    runner.admit(0, rows)
    tokens = [[token] * len(images) for token in prompt[:prefilled]]
    for _ in range(steps - prefilled):
        step = runner.decode_step(bucket)
        if logits is not None:
            logits.append(step[: len(images)].clone())
        tokens.append(runner.tokens(len(images)))
    return np.array(tokens).T


def assert_as_transformers(folder: Path, encoder: Any, reference: Reference, steps: int) -> None:
    """Encoder output, logits and greedy tokens of two images equal those of a checkpoint's transformers model.

    ``encoder``: the model's encoder; ``reference(images, steps)``: its tokens and the logits of each step.
    """
    runner = build_runner(folder)
    images = random_images(runner.config, 2)
    with torch.no_grad():
        expected = encoder(pixel_values=pixel_values(images)).last_hidden_state
        output = runner.encode(TABLE.fit(2), images, 0)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=2e-4)
        logits: list[torch.Tensor] = []
        tokens = generate(runner, images, steps, logits=logits)
    expected_tokens, expected_logits = reference(images, steps)
    assert tokens.tolist() == expected_tokens
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected_logits), rtol=1e-4, atol=1e-4)
    assert len(set(tokens.flatten().tolist())) > 2, "the model must not repeat one token"
    assert expected_tokens[0] != expected_tokens[1], "the model must see the image"
