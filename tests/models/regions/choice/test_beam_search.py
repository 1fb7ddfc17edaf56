"""One step of beam search after another, over a language of a table, against a search in plain Python."""

import math
import random
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from snapcap.models.layers.choice import select
from snapcap.models.memory.torch_memory import TorchHostMemory
from snapcap.models.regions.state import SELECT_INPUTS, BeamState, RowStart

VOCABULARY, LENGTH, SLOTS = 41, 16, 12
START = 0
EOS = (3, 7)


@dataclass(frozen=True)
class Asked:
    """One search. The language is a table of scores, for this request."""

    table: torch.Tensor
    beams: int
    prompt: tuple[int, ...]
    new_tokens: int
    length_penalty: float
    early: bool | Literal["never"]


def table(seed: int, ends: float) -> torch.Tensor:
    """Log-probabilities [L, V, V] by the position and the token there; the larger ``ends``, the likelier an end.

    By the position as well, or orders of the same transitions would score alike.
    """
    scores = torch.randn(LENGTH, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    scores[..., list(EOS)] += ends
    return scores.log_softmax(-1)


def expected(asked: Asked) -> list[int]:
    """Beam search as a textbook has it, with transformers' rules for when to stop."""
    prompt = [START, *asked.prompt]
    running: list[tuple[float, list[int]]] = [(0.0, prompt)]
    finished: list[tuple[float, list[int]]] = []
    for generated in range(1, asked.new_tokens + 1):
        continued = [
            (score + asked.table[len(tokens) - 1, tokens[-1], token].item(), [*tokens, token])
            for score, tokens in running
            for token in range(VOCABULARY)
        ]
        continued.sort(key=lambda each: -each[0])
        last = generated == asked.new_tokens
        for score, tokens in continued[: asked.beams]:
            if last or tokens[-1] in EOS:
                finished.append((score / generated**asked.length_penalty, tokens))
        finished = sorted(finished, key=lambda each: -each[0])[: asked.beams]
        running = [each for each in continued if each[1][-1] not in EOS][: asked.beams]
        if len(finished) == asked.beams:
            to_come = asked.new_tokens if asked.early == "never" and asked.length_penalty > 0 else generated
            best = running[0][0] / to_come**asked.length_penalty
            if asked.early is True or best <= finished[-1][0]:
                break
    return finished[0][1]


class Device:
    """Slots whose cache is the tokens that they hold."""

    def __init__(self) -> None:
        self.state = BeamState.allocate(SLOTS, LENGTH, TorchHostMemory())
        self.tokens = torch.zeros(SLOTS, dtype=torch.int64)
        self.positions = torch.zeros(SLOTS, dtype=torch.int64)
        self.forced = torch.full((SLOTS, LENGTH), -1)
        self.cache = torch.full((SLOTS, LENGTH), -1)
        self.ends = torch.zeros(VOCABULARY, dtype=torch.bool)
        self.ends[list(EOS)] = True
        # K/V, which a CPU leaves to the host.
        self.caches = (torch.empty(1, SLOTS, 1, 1, LENGTH), torch.empty(1, SLOTS, 1, LENGTH, 1))
        self.parents: list[int] = []

    def put(self, prompt: tuple[int, ...], slots: list[int], asked: Asked | None) -> None:
        for slot in slots:
            self.state.start(range(slot, slot + 1), [RowStart((START,), 1)])
            self.tokens[slot], self.positions[slot], self.forced[slot] = START, 0, -1
            self.forced[slot, 1 : 1 + len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        if asked is not None:
            self.state.group(slots, 1 + len(prompt), asked.new_tokens, asked.length_penalty, asked.early)

    def step(self, bucket: int, languages: list[torch.Tensor]) -> dict[int, list[int]]:
        """All slots of the bucket one token on; the hypotheses of searches that ended, by slot."""
        rows = torch.arange(bucket)
        tokens, positions = self.tokens[:bucket], self.positions[:bucket]
        self.cache[rows, positions] = tokens
        log_probs = torch.stack([languages[slot][positions[slot], tokens[slot]] for slot in range(bucket)])
        positions.add_(1).clamp_(max=LENGTH - 1)  # as every decoder does
        prompt = self.forced[rows, positions]
        tokens.copy_(torch.where(prompt >= 0, prompt, log_probs.argmax(-1)))
        own = (torch.tensor([True]), tokens, positions, self.forced[:bucket], self.ends, *self.caches)
        parents = select(log_probs, *own, *self.state.inputs(SELECT_INPUTS, bucket))
        self.cache[:bucket] = self.cache[parents]
        self.parents = parents.tolist()
        outcomes = self.state.outcomes[:bucket]
        return {slot: row[: row[-1]].tolist() for slot, row in enumerate(outcomes) if row[-1]}

    def move(self, source: int, target: int) -> None:
        self.state.move([source], [target])
        for each in (self.tokens, self.positions, self.forced, self.cache):
            each[target] = each[source]


def random_search(luck: random.Random) -> Asked:
    prompt = tuple(luck.choices((8, 9, EOS[0]), k=luck.choice((0, 0, 3))))
    return Asked(
        table(luck.randrange(10**6), luck.choice((-2.0, 0.0, 2.0, 4.0))),
        luck.choice((1, 2, 3, 4, 5, 8)),
        prompt,
        luck.randint(1, LENGTH - 1 - len(prompt)),
        luck.choice((-1.0, 0.0, 0.5, 1.0, 2.0)),
        luck.choice((True, False, "never")),
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_search_gives_what_a_search_in_plain_python_gives(seed: int) -> None:
    luck = random.Random(seed)
    asked = random_search(luck)
    device = Device()
    device.put(asked.prompt, luck.sample(range(asked.beams + 3), asked.beams), asked)
    for _ in range(LENGTH):
        ended = device.step(asked.beams + 3, [asked.table] * SLOTS)
        if ended:
            break
    assert list(ended.values()) == [expected(asked)]


@pytest.mark.parametrize("seed", range(30))
def test_searches_of_any_sizes_beside_greedy_rows_give_what_each_gives_alone(seed: int) -> None:
    luck = random.Random(1000 + seed)
    device, languages = Device(), [table(5, 0.0)] * SLOTS
    waiting = [random_search(luck) for _ in range(8)]
    greedy = table(99, 0.0)
    places: dict[int, list[int]] = {}  # of each search that runs, its slots
    free = list(range(SLOTS))
    luck.shuffle(free)
    alone = free.pop()
    languages[alone] = greedy
    device.put((), [alone], None)
    written: list[int] = []
    results: dict[int, list[int]] = {}
    number = 0
    for step in range(200):
        while number < len(waiting) and len(free) >= waiting[number].beams and luck.random() < 0.7:
            asked = waiting[number]
            slots = [free.pop() for _ in range(asked.beams)]
            for slot in slots:
                languages[slot] = asked.table
            device.put(asked.prompt, slots, asked)
            places[number] = slots
            number += 1
        ended = device.step(SLOTS, languages)
        if step < LENGTH - 2:
            written.append(int(device.tokens[alone]))
        for each, slots in list(places.items()):
            assert len({int(device.positions[slot]) for slot in slots}) == 1
            done = [slot for slot in slots if slot in ended]
            assert done in ([], slots[:1]), "the first row of a search has its hypothesis"
            if done:
                results[each] = ended[done[0]]
                free += places.pop(each)
                continue
            for slot in slots:  # a row that another goes on from has stayed where it was
                parent = device.parents[slot]
                assert parent in slots
                assert device.parents[parent] == parent
            for slot in slots:  # what is cached is what the row holds
                at = int(device.positions[slot])
                assert device.cache[slot, :at].tolist() == device.state.sequences[0, slot, :at].tolist()
            if free and luck.random() < 0.3:
                moved, target = luck.randrange(len(slots)), free.pop()
                device.move(slots[moved], target)
                languages[target] = languages[slots[moved]]
                free.insert(0, slots[moved])
                slots[moved] = target
        if len(results) == len(waiting):
            break
    assert results == {each: expected(asked) for each, asked in enumerate(waiting)}
    token, want = START, []
    for position in range(len(written)):
        token = int(greedy[position, token].argmax())
        want.append(token)
    assert written == want


def test_a_penalty_too_large_for_a_float_is_no_error() -> None:
    state = BeamState.allocate(4, LENGTH, TorchHostMemory())
    state.group([0, 1], 1, 9, 1e6, "never")
    assert state.divisors[0, 0, 1] == 1
    assert math.isfinite(state.divisors[0, 0, 2])


def test_a_search_that_finds_nothing_ends_all_the_same() -> None:
    device = Device()
    device.put((9,), [0, 1], Asked(table(0, 0.0), 2, (9,), 3, 1.0, False))
    nothing = [torch.full((LENGTH, VOCABULARY, VOCABULARY), float("-inf"))] * SLOTS
    ended = [device.step(2, nothing) for _ in range(4)]
    assert next(each for each in ended if each)[0][:2] == [START, 9]
