"""Sampling against torch's own softmax and truncation, and within the decode step of a real model."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.layers.choice import sample
from snapcap.models.memory.torch_memory import torch_memory
from snapcap.models.processing.transform import Normalisation
from snapcap.models.regions.state import DecodeState
from snapcap.models.regions.table import build_regions
from snapcap.models.weights.load import load_weights
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.progress.status import COMPONENTS
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Runner, open_callables
from snapcap.warmup.runtime.slot_request import Needs, SamplingParams, SlotRequest
from snapcap.warmup.runtime.torch_model import LoadedModel, torch_device

VOCABULARY = 12
SETTINGS = [
    (1.0, 0, 1.0),
    (0.3, 0, 1.0),
    (2.0, 0, 1.0),
    (1.0, 3, 1.0),
    (1.0, 1, 1.0),
    (1.0, 100, 1.0),
    (1.0, 0, 0.5),
    (0.7, 5, 0.8),
    (1.0, 0, 0.01),
]


def truncated_softmax(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The distribution, written as transformers' warpers are: mask logits, then renormalise. [V] -> [V]."""
    scaled = logits / temperature
    if top_k:
        worst = scaled.topk(min(top_k, len(scaled))).values[-1]
        scaled = scaled.masked_fill(scaled < worst, -torch.inf)
    ascending, order = scaled.sort()
    # From the least likely upwards, tokens go while the rest still holds top_p; one always stays.
    gone = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    gone[-1] = False
    return scaled.masked_fill(torch.zeros_like(gone).scatter(0, order, gone), -torch.inf).softmax(-1)


def draw(logits: Tensor, uniforms: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The token for each number of ``uniforms`` [n], all from one distribution [V]; a row each."""
    rows = len(uniforms)
    tokens = torch.full((rows,), -7)
    sample(
        logits.expand(rows, -1),
        tokens,
        torch.zeros(rows, dtype=torch.int64),
        torch.full((rows, 1), -1),
        uniforms.unsqueeze(1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k or len(logits)),
        torch.full((rows,), top_p),
        torch.zeros(2, rows, 2, dtype=torch.int64),
    )
    return tokens


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_tokens_come_as_often_as_torchs_own_distribution_says(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    expected = truncated_softmax(logits, temperature, top_k, top_p)
    # A grid instead of random numbers: each token's share is then exact but for the grid's step.
    steps = 20_000
    tokens = draw(logits, (torch.arange(steps) + 0.5) / steps, temperature, top_k, top_p)
    shares = torch.bincount(tokens, minlength=VOCABULARY) / steps
    torch.testing.assert_close(shares, expected, rtol=0, atol=2 / steps)
    assert torch.equal(shares > 0, expected > 2 / steps)


def test_the_ends_of_the_unit_interval_give_kept_tokens() -> None:
    logits = torch.tensor([0.0, 3.0, -torch.inf, 2.0])
    # 1 - 2**-53 is below 1 in Python, and 1 in fp32.
    uniforms = torch.tensor([0.0, float(np.nextafter(np.float32(1), np.float32(0))), 1 - 2**-53])
    for top_k, top_p, last in ((0, 1.0, 0), (2, 1.0, 3), (0, 0.9, 3), (1, 1.0, 1)):
        assert draw(logits, uniforms, 1.0, top_k, top_p).tolist() == [1, last, last]


def test_each_row_has_its_own_settings_and_greedy_and_prompt_rows_are_left_alone() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, VOCABULARY)
    tokens = torch.tensor([50, 51, 52, 53])
    positions = torch.tensor([1, 2, 1, 3])
    forced = torch.full((4, 5), -1)
    forced[2, 1] = 52  # still inside its prompt
    uniforms = torch.rand(4, 5)
    temperature, top_k = torch.tensor([0.0, 1.0, 1.0, 0.5]), torch.tensor([1, 1, VOCABULARY, VOCABULARY])
    sequences = torch.full((2, 6, 6), -3)
    result = sample(logits, tokens, positions, forced, uniforms, temperature, top_k, torch.ones(4), sequences)
    alone = draw(logits[3], uniforms[3, 3:4], 0.5, 0, 1.0)
    assert tokens.tolist() == result.tolist() == [50, logits[1].argmax().item(), 52, alone.item()]
    # Penalties look at what rows hold, so each row's token is noted at its position, and nothing else.
    rows = torch.arange(4)
    assert torch.equal(sequences[0, rows, positions], tokens)
    assert (sequences == -3).sum() == sequences.numel() - 4


# --- inside a decode step ---

TABLE = BucketTable.of((1, 4, 8))
STEPS = 14


@pytest.fixture(scope="module")
def runner(make_captioner: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder: Path = tmp_path_factory.mktemp("captioner")
    make_captioner({}, {}).save_pretrained(folder)
    config = ModelConfig.from_folder(folder)
    cpu = torch.device("cpu")
    weights = load_weights(folder, config, Normalisation(1 / 255, (0.5,) * 3, (0.5,) * 3), cpu, torch.float32)
    state = DecodeState.allocate(config, TABLE.largest.size, 32, torch_memory(cpu), "float32")
    runner = Runner(LoadedModel(config, build_regions(config), weights, state), torch_device(cpu))
    for bucket in TABLE.buckets:
        for component in COMPONENTS:
            runner.bind(component, bucket, open_callables(runner.regions, component, bucket, EagerBackend()))
    return runner


def row(
    seed: int, temperature: float = 1.0, prompt: tuple[int, ...] = (), top_k: int = 0, top_p: float = 1.0
) -> SlotRequest:
    numbers = random.Random(seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    return SlotRequest(prompt, params, [numbers.random() for _ in range(32)])


def image(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, (96, 96, 3), dtype=np.uint8)


def generate(runner: Runner, pairs: list[tuple[Any, SlotRequest]]) -> list[list[int]]:
    """Tokens of each pair of image and row, all in one bucket."""
    bucket = TABLE.fit(len(pairs))
    needs = Needs(sampling=any(row.params.temperature for _, row in pairs))
    with torch.no_grad():
        runner.encode(bucket, [pixels for pixels, _ in pairs], 0)
        for slot, (_, each) in enumerate(pairs):
            runner.admit(slot, [each])
        steps = []
        for _ in range(STEPS):
            runner.decode_step(bucket, needs)
            steps.append(runner.tokens(len(pairs)))
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def test_a_seed_gives_the_same_tokens_alone_and_at_every_place_of_a_full_batch(runner: Runner) -> None:
    wanted = (image(1), row(7, 1.3, top_k=40, top_p=0.95))
    (alone,) = generate(runner, [wanted])
    (again,) = generate(runner, [wanted])
    assert alone == again
    others = [(image(10 + index), row(20 + index, index / 3)) for index in range(7)]
    for place in range(8):
        batch = [*others[:place], wanted, *others[place:]]
        assert generate(runner, batch)[place] == alone
    (other_seed,) = generate(runner, [(image(1), row(8, 1.3, top_k=40, top_p=0.95))])
    assert other_seed != alone


def test_greedy_rows_of_a_sampling_step_are_unchanged(runner: Runner) -> None:
    greedy = [(image(index), SlotRequest()) for index in range(3)]
    expected = generate(runner, greedy)
    mixed = [greedy[0], (image(9), row(1, 2.0)), greedy[1], (image(8), row(2, 0.4)), greedy[2]]
    tokens = generate(runner, mixed)
    assert [tokens[0], tokens[2], tokens[4]] == expected


def test_sampling_never_overwrites_the_prompt(runner: Runner) -> None:
    prompt = (17, 4, 60, 5)
    for seed in range(5):
        (tokens,) = generate(runner, [(image(1), row(seed, 2.0, prompt))])
        assert tuple(tokens[:4]) == prompt
    free = {tuple(generate(runner, [(image(1), row(seed, 2.0, prompt))])[0][4:]) for seed in range(5)}
    assert len(free) == 5


def test_one_token_to_choose_from_is_the_greedy_one(runner: Runner) -> None:
    (greedy,) = generate(runner, [(image(1), SlotRequest())])
    assert generate(runner, [(image(1), row(3, 2.0, top_k=1))]) == [greedy]
    for top_p in (0.0, 1e-50, 1e-9):
        assert generate(runner, [(image(1), row(3, 2.0, top_p=top_p))]) == [greedy]


def test_a_slot_remembers_nothing_of_the_request_before(runner: Runner) -> None:
    (expected,) = generate(runner, [(image(1), SlotRequest())])
    generate(runner, [(image(2), row(1, 2.0, (5, 6, 7), top_k=2, top_p=0.1))])
    assert generate(runner, [(image(1), SlotRequest())]) == [expected]
