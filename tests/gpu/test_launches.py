"""Nothing that a step or an admission launches makes the host wait for the device."""

from collections.abc import Callable

import pytest
import torch
from support.parity.device_cases import CACHE_LENGTH, Captioner, no_waiting, open_model, open_runner, plan_of

from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Runner, open_callables
from snapcap.warmup.runtime.slot_request import Needs, SamplingParams, SlotRequest

ONE, FOUR = Bucket(1), Bucket(4)
KINDS = {
    "greedy": (SlotRequest(), Needs()),
    "sampled": (
        SlotRequest((), SamplingParams(temperature=0.7, top_k=5, top_p=0.9), [0.5] * CACHE_LENGTH),
        Needs(sampling=True),
    ),
    "penalised": (
        SlotRequest(params=SamplingParams(repetition_penalty=1.3, no_repeat_ngram_size=2)),
        Needs(penalties=True),
    ),
    "searched": (SlotRequest(params=SamplingParams(num_beams=4), new_tokens=20), Needs(beams=True)),
}


@pytest.fixture
def runner(captioners: dict[str, Captioner], device: torch.device) -> Runner:
    plan = plan_of(device, "bfloat16", (1, 4))
    return open_runner(open_model(captioners["vit-gpt2"], plan), plan, EagerBackend())


def tokens_after(runner: Runner, row: SlotRequest, run: Callable[[], None]) -> list[int]:
    """Steps launched one behind the other while nothing is read but the last tokens."""
    runner.admit(0, [row] * 4)
    if row.params.searches:
        runner.group(range(4), row)
    run()
    return runner.tokens(4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "launched one by one"])
def test_steps_are_launched_without_waiting(
    graphs: bool, kind: str, runner: Runner, captioners: dict[str, Captioner], device: torch.device
) -> None:
    row, needs = KINDS[kind]
    runner.encode(FOUR, captioners["vit-gpt2"].images(4), 0)
    if not graphs:
        runner.bind("decoder", FOUR, open_callables(runner.regions, "decoder", FOUR, EagerBackend()))

    def steps() -> None:
        for _ in range(10):
            runner.decode_step(FOUR, needs)

    expected = tokens_after(runner, row, steps)  # before: what is made once is made

    def watched() -> None:
        with no_waiting(device):
            steps()

    assert tokens_after(runner, row, watched) == expected


def test_reading_behind_admission_and_moves_are_launched_without_waiting(
    runner: Runner, captioners: dict[str, Captioner], device: torch.device
) -> None:
    """An engine's turn: the next step goes before the last one's tokens are read, and a row joins between steps."""
    images = captioners["vit-gpt2"].images(4)

    def turn() -> list[list[int]]:
        runner.encode(FOUR, images, 0)
        runner.admit(0, [SlotRequest((17, 4))] * 3)
        seen, pending = [], None
        with no_waiting(device):
            for _ in range(6):
                runner.decode_step(FOUR)
                behind, pending = pending, runner.read_tokens(3)
                if behind is not None:
                    seen.append(behind.result())
        with no_waiting(device):
            runner.encode(ONE, images[3:], 3)
            runner.admit(3, [SlotRequest((17, 4))])
            runner.move([(3, 0)])
            runner.decode_step(FOUR)
        seen.append(runner.tokens(4))
        return seen

    assert turn() == turn()


def test_rows_go_on_where_they_are_moved_to(
    runner: Runner, captioners: dict[str, Captioner], device: torch.device
) -> None:
    """Several at once, behind a step that is under way."""
    moves = [(3, 0), (2, 1)]
    runner.encode(FOUR, captioners["vit-gpt2"].images(4), 0)
    runner.admit(0, [KINDS["sampled"][0], SlotRequest((17, 4)), SlotRequest((9,)), SlotRequest()])
    for _ in range(3):
        runner.decode_step(FOUR)
    before = runner.tokens(4)
    with no_waiting(device):
        runner.decode_step(FOUR)
        runner.move(moves)
    for name, buffer in runner.state.buffers.items():
        slots = 1 if buffer.dim() == 5 else 0  # a cache has its layers first
        for source, target in moves:
            assert torch.equal(buffer.select(slots, source), buffer.select(slots, target)), name
    for _ in range(4):
        runner.decode_step(FOUR)
        tokens = runner.tokens(4)
        assert [tokens[target] for _, target in moves] == [tokens[source] for source, _ in moves]
    assert len({*before, *tokens}) > 2, "the rows must differ"
