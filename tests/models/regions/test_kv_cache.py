"""Moves of rows between slots: all that a slot holds, and nothing else."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from snapcap.models.config import ModelConfig
from snapcap.models.memory.torch_memory import TorchDeviceMemory, TorchHostMemory
from snapcap.models.regions.state import DecodeState

SLOTS, CACHE_LENGTH = 7, 9
State = DecodeState[torch.Tensor]


@pytest.fixture(scope="module")
def config(make_captioner: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("captioner")
    make_captioner({}, {}).save_pretrained(folder)
    return ModelConfig.from_folder(folder)


MEMORIES = {
    "numpy, as on the CPU": TorchHostMemory(),
    # Launches, and keys in other strides: neither needs a GPU.
    "torch, as on CUDA": TorchDeviceMemory(torch.device("cpu")),
}


@pytest.fixture(params=MEMORIES)
def state(config: ModelConfig, request: pytest.FixtureRequest) -> State:
    """Every number of it is another one."""
    state = DecodeState.allocate(config, SLOTS, CACHE_LENGTH, MEMORIES[request.param], "float32")
    assert state.key.is_contiguous() == (request.param == "numpy, as on the CPU")
    first = 1
    for buffer in contents(state).values():
        # By the values, not by the memory, which is what a move works on.
        buffer.copy_(torch.arange(first, first + buffer.numel()).view(buffer.shape))
        first += buffer.numel()
    assert first < 2**24, "fp32 tells these apart"
    return state


def contents(state: State) -> dict[str, torch.Tensor]:
    return state.buffers


def copied(state: State) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in contents(state).items()}


def rows_of(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """The buffer with its slots first."""
    return buffer.transpose(0, 1) if name in ("key", "value", "cross_key", "cross_value") else buffer


def assert_moved(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], moves: list[tuple[int, int]]
) -> None:
    for name, buffer in before.items():
        expected = rows_of(name, buffer).clone()
        for source, target in moves:
            expected[target] = rows_of(name, buffer)[source]
        assert torch.equal(rows_of(name, after[name]), expected), name


@pytest.mark.parametrize(
    "moves",
    [
        [(6, 0)],
        [(6, 1), (5, 3)],
        [(4, 0), (6, 1), (5, 2)],
        [(0, slot) for slot in (1, 3, 4)],  # the first row of a search becomes the others'
    ],
)
def test_a_move_copies_every_buffer_of_a_slot_and_leaves_all_else_alone(
    state: State, moves: list[tuple[int, int]]
) -> None:
    before = copied(state)
    state.move([source for source, _ in moves], [target for _, target in moves])
    assert_moved(before, contents(state), moves)


@pytest.mark.parametrize("seed", range(5))
def test_several_moves_at_once_are_the_same_as_one_by_one(state: State, seed: int) -> None:
    luck = random.Random(seed)
    for _ in range(10):
        slots = luck.sample(range(SLOTS), SLOTS)
        count = luck.randint(1, SLOTS // 2)
        targets = slots[:count]
        sources = luck.choices(slots[count:], k=count)
        single = replace(state, **copied(state))
        for source, target in zip(sources, targets, strict=True):
            single.move([source], [target])
        state.move(sources, targets)
        for name, buffer in contents(state).items():
            assert torch.equal(buffer, contents(single)[name]), name


@pytest.mark.parametrize(
    ("sources", "targets"), [([6, 0], [0, 1]), ([3], [3]), ([5, 6], [2, 2])], ids=["chain", "itself", "same target"]
)
def test_moves_whose_order_would_matter_are_refused(state: State, sources: list[int], targets: list[int]) -> None:
    before = copied(state)
    with pytest.raises(ValueError, match="overlap"):
        state.move(sources, targets)
    assert_moved(before, contents(state), [])


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_moved_as_they_are(config: ModelConfig, dtype: str, memory: str) -> None:
    """Views of another dtype are copied: no number may be rounded, nor a NaN made another."""
    state = DecodeState.allocate(config, SLOTS, CACHE_LENGTH, MEMORIES[memory], dtype)
    torch.manual_seed(0)
    for buffer in contents(state).values():
        bits = torch.randint(-(2**15), 2**15, (*buffer.shape, buffer.element_size() // 2), dtype=torch.int16)
        buffer.copy_(bits.view(buffer.dtype).squeeze(-1))
    state.move([5, 6], [1, 0])
    for name, buffer in contents(state).items():
        rows = rows_of(name, buffer).unsqueeze(-1).contiguous().view(torch.int16)
        assert torch.equal(rows[[1, 0]], rows[[5, 6]]), name


def test_a_state_that_has_moved_rows_has_a_zeroed_one_of_the_same_layout(state: State) -> None:
    state.move([6], [0])
    twin = state.zeroed()
    before = copied(state)
    for name, buffer in contents(twin).items():
        assert (buffer == 0).all()
        assert (buffer.shape, buffer.stride()) == (contents(state)[name].shape, contents(state)[name].stride())
        buffer.fill_(1)
    twin.move([5], [2])
    assert_moved(before, contents(state), [])
