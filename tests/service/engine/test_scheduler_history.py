"""Random histories of a scheduler over a device of lists: every request gets exactly its own tokens."""

import random

import pytest
from support.fakes.scheduling import EOS, LIMITS, Clock, advance, request

from snapcap.service.engine.request import CaptionRequest
from snapcap.service.engine.scheduler import RunningRequest, Scheduler
from snapcap.service.errors import DeadlineExceeded
from snapcap.warmup.plan.plan import BucketTable


def own_token(name: str, place: int) -> int:
    """What the device generates for a request as its token number ``place``; now and then the end."""
    return random.Random(f"{name}/{place}").choice((EOS, *range(10, 20)))


def own_tokens(sent: CaptionRequest) -> tuple[tuple[int, ...], str]:
    """What a request must get, whatever happens around it."""
    limit = LIMITS.new_tokens(len(sent.prompt_ids), sent.params.max_new_tokens)
    tokens: list[int] = []
    for place in range(limit):
        token = own_token(sent.id, place)
        if token == EOS:
            return tuple(tokens), "stop"
        tokens.append(token)
    return tuple(tokens), "length"


class ListDevice:
    """Slots as a list: what is in a slot, how many tokens it has been given, and which beam it is."""

    def __init__(self, slots: int) -> None:
        self.slots: list[tuple[CaptionRequest, int, int] | None] = [None] * slots
        self.images: list[CaptionRequest | None] = [None] * slots

    def put(self, slots: list[int], sent: CaptionRequest) -> None:
        assert len(slots) == sent.params.num_beams
        for beam, slot in enumerate(slots):
            self.slots[slot] = (sent, 0, beam)

    def move(self, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            assert source > target
            self.slots[target], self.images[target] = self.slots[source], self.images[source]

    def step(self, rows: int) -> tuple[list[int], dict[int, list[int]]]:
        tokens, hypotheses = [], {}
        for slot in range(rows):
            held = self.slots[slot]
            assert held is not None
            sent, count, beam = held
            self.slots[slot] = (sent, count + 1, beam)
            prompt = sent.prompt_ids
            tokens.append(prompt[count] if count < len(prompt) else own_token(sent.id, count - len(prompt)))
            generated, reason = own_tokens(sent)
            length = len(generated) + (reason == "stop")
            if sent.params.num_beams > 1 and beam == 0 and count + 1 == len(prompt) + length:
                hypotheses[slot] = [1, *prompt, *generated, *([EOS] if reason == "stop" else [])]
        return tokens, hypotheses


Aside = tuple[list[RunningRequest], int]  # requests set aside, and the first slot of their images


def admit(
    scheduler: Scheduler, device: ListDevice, luck: random.Random | None, aside: Aside | None
) -> tuple[list[RunningRequest], Aside | None]:
    """Admits requests, whose images then are in their slots. With ``luck``, after some steps of the other rows."""
    if aside is not None:
        if luck is not None and scheduler.running and luck.random() < 0.7:
            return [], aside
        admitted, moves = scheduler.put_back(*aside)
        device.move(moves)
        return admitted, None
    admitted = scheduler.admit()
    first = len(scheduler.running) - sum(row.slots for row in admitted)
    for slot, row in enumerate(admitted, start=first):
        device.images[slot] = row.request
    if luck is None or not admitted:
        return admitted, None
    scheduler.set_aside(admitted)
    return [], (admitted, first)


@pytest.mark.parametrize("mode", ["in_step", "ahead", "beside"])
@pytest.mark.parametrize("seed", range(20))
def test_in_a_random_history_every_request_gets_exactly_its_own_tokens(seed: int, mode: str) -> None:
    luck, clock = random.Random(seed), Clock()
    table = BucketTable.of((1, 3, 7))
    scheduler = Scheduler(table, LIMITS, clock=clock)
    device = ListDevice(table.largest.size)
    sent: list[CaptionRequest] = []
    aside: Aside | None = None
    step: tuple[list[RunningRequest], list[int], dict[int, list[int]]] | None = None  # launched, but not yet read
    for event in range(500):
        clock.now += 1.0
        for _ in range(luck.choice((0, 0, 1, 3, 12 if event % 10 == 0 else 1)) if event < 350 else 0):
            prompt = tuple(luck.choices((EOS, 30, 31), k=luck.choice((0, 0, 2, 18))))
            room = LIMITS.new_tokens(len(prompt), 1000)
            new = request(
                len(sent),
                prompt,
                deadline=clock.now + luck.choice((2, 10, 1000)),
                max_new_tokens=luck.choice((None, 1, room)),
                num_beams=luck.choice((1, 1, 1, 2, 4, 7)),
            )
            if scheduler.depth < 9:
                scheduler.submit(new)
                sent.append(new)
        if luck.random() < 0.1 and sent:
            luck.choice(sent[-8:]).future.cancel()
        device.move(scheduler.drop_lost())
        admitted, aside = admit(scheduler, device, luck if mode == "beside" else None, aside)
        first = len(scheduler.running) - sum(row.slots for row in admitted)
        for slot, row in enumerate(admitted, start=first):
            assert device.images[slot] is row.request
            slots = scheduler.slots_of(row)
            assert slots[0] == slot
            device.put(slots, row.request)
        rows = len(scheduler.running)
        assert rows <= table.largest.size
        held = [device.slots[slot] for slot in range(rows)]
        assert [each and each[0] for each in held] == [row.request for row in scheduler.running]
        launched = (scheduler.launched(), *device.step(rows)) if scheduler.needs_step() else None
        read, step = (step, launched) if mode == "ahead" else (launched, None)
        if read is not None:
            running, tokens, hypotheses = read
            device.move(advance(scheduler, running, tokens, "eager", hypotheses))
    assert (scheduler.running, scheduler.depth) == ([], 0)

    outcomes = {"completed": 0, "searched": 0, "late": 0, "cancelled": 0}
    for each in sent:
        if each.future.cancelled():
            outcomes["cancelled"] += 1
        elif each.future.exception(0) is not None:
            assert isinstance(each.future.exception(), DeadlineExceeded)
            outcomes["late"] += 1
        else:
            completion = each.future.result()
            assert (completion.tokens, completion.finish_reason) == own_tokens(each)
            outcomes["completed" if each.params.num_beams == 1 else "searched"] += 1
    assert min(outcomes.values()) > 0, "the history must hold every kind of event"
