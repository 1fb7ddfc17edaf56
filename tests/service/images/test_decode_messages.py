"""What decode processes and their parent say: whole again at the other end, and nothing else gets through."""

import math
import pickle
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapcap.models.processing.image_formats import READ, Reason
from snapcap.service.images.messages import (
    Answer,
    AnswerReader,
    BadAnswer,
    Broken,
    Decoded,
    Needs,
    Refused,
    pack_answer,
)

MOMENT = st.floats(0, 1e9)
SIDE = st.integers(1, 2**32 - 1)
ANSWERS = st.one_of(
    st.builds(Decoded, st.sampled_from(READ), MOMENT, MOMENT, st.tuples(SIDE, SIDE)),
    st.builds(Refused, st.sampled_from(get_args(Reason)), st.text(max_size=99)),
    st.builds(Broken, st.text(max_size=99)),
    st.builds(Needs, st.integers(0, 2**63)),
)


@given(st.lists(ANSWERS, max_size=5), st.integers(1, 40))
def test_answers_arrive_whole_however_they_are_cut(sent: list[Answer], piece: int) -> None:
    data = b"".join(map(pack_answer, sent))
    reader, found = AnswerReader(), []
    for start in range(0, len(data), piece):
        found += reader.feed(data[start : start + piece])
    assert found == sent


@given(st.lists(st.binary(max_size=120), max_size=6))
def test_nothing_else_gets_through(pieces: list[bytes]) -> None:
    reader = AnswerReader()
    try:
        for piece in pieces:
            for answer in reader.feed(piece):
                check(answer)
    except BadAnswer:
        pass


def check(answer: Answer) -> None:
    match answer:
        case Decoded(name, began, seconds, size):
            assert min(size) > 0
            assert name in READ
            assert math.isfinite(began)
            assert 0 <= seconds < math.inf
        case Refused(reason, sentence):
            assert reason in get_args(Reason)
            assert len(sentence) <= 8000
        case Broken(trace):
            assert len(trace) <= 8000
        case Needs(size):
            assert 0 <= size < 2**64


class Opened:
    """A pickle that is read is heard of."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('a pickle was read')",)


def test_a_pickle_is_bytes_as_any() -> None:
    with pytest.raises(BadAnswer):
        AnswerReader().feed(pickle.dumps(Opened()) * 9)


def test_a_long_text_is_cut_and_not_waited_for() -> None:
    (answer,) = AnswerReader().feed(pack_answer(Broken("a" * 9_000 + "the error")))
    assert isinstance(answer, Broken)
    assert (len(answer.trace), answer.trace[-9:]) == (8000, "the error")
    with pytest.raises(BadAnswer, match="a text of 65535 bytes"):
        AnswerReader().feed(pack_answer(Broken(""))[:-2] + b"\xff\xff")
