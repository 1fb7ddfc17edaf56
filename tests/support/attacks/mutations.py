"""Changes good files as damage, chance and attackers do: strategies for Hypothesis."""

from collections.abc import Callable, Sequence
from typing import Literal

from hypothesis import strategies as st

# Numbers that parsers stumble over: lengths at the edges of their fields.
NUMBERS = (0, 1, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
Edit = Callable[[bytes], bytes]


def mutated(seeds: Sequence[bytes], marks: Sequence[bytes] = (), edits: int = 6) -> st.SearchStrategy[bytes]:
    """Returns a strategy of seeds after some edits. ``marks`` are byte strings with a meaning in the format."""
    return st.builds(_apply, st.sampled_from(seeds), st.lists(_edit(seeds, marks), max_size=edits))


def _apply(seed: bytes, edits: Sequence[Edit]) -> bytes:
    for edit in edits:
        seed = edit(seed)[:200_000]
    return seed


def _edit(seeds: Sequence[bytes], marks: Sequence[bytes]) -> st.SearchStrategy[Edit]:
    # Where: as a share of the file, so that shrinking a file leaves the place.
    place = st.floats(0, 1, exclude_max=True)
    pieces = st.one_of(
        st.binary(max_size=12),
        st.builds(_field, st.sampled_from(NUMBERS), st.sampled_from((1, 2, 4)), st.sampled_from(("big", "little"))),
        *([st.sampled_from(marks)] if marks else []),
    )
    return st.one_of(
        st.builds(_overwrite, place, pieces),
        st.builds(_overwrite, place, pieces),
        st.builds(_insert, place, pieces),
        st.builds(_repeat, place, st.integers(1, 64), st.integers(2, 300)),
        st.builds(_delete, place, st.integers(1, 64)),
        st.builds(_cut, place),
        st.builds(_flip, place, st.integers(0, 7)),
        st.builds(_splice, place, st.sampled_from(seeds), place),
    )


def _field(number: int, width: int, order: Literal["big", "little"]) -> bytes:
    return (number & (256**width - 1)).to_bytes(width, order)


def _overwrite(place: float, piece: bytes) -> Edit:
    def edit(data: bytes) -> bytes:
        at = int(place * len(data))
        return data[:at] + piece + data[at + len(piece) :]

    return edit


def _insert(place: float, piece: bytes) -> Edit:
    def edit(data: bytes) -> bytes:
        at = int(place * len(data))
        return data[:at] + piece + data[at:]

    return edit


def _repeat(place: float, length: int, times: int) -> Edit:
    def edit(data: bytes) -> bytes:
        at = int(place * len(data))
        return data[:at] + data[at : at + length] * times + data[at + length :]

    return edit


def _delete(place: float, length: int) -> Edit:
    def edit(data: bytes) -> bytes:
        at = int(place * len(data))
        return data[:at] + data[at + length :]

    return edit


def _cut(place: float) -> Edit:
    return lambda data: data[: int(place * len(data))]


def _flip(place: float, bit: int) -> Edit:
    def edit(data: bytes) -> bytes:
        at = int(place * len(data))
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] if data else data

    return edit


def _splice(place: float, other: bytes, other_place: float) -> Edit:
    return lambda data: data[: int(place * len(data))] + other[int(other_place * len(other)) :]
