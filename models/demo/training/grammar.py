"""Defines the captions of the demo model: words, phrases and an enumeration of every sentence.

caption = scene "on" background
scene   = thing                                   one thing
        | count things                            two to four equal things
        | thing relation thing                    the smaller first; of equal sizes the left or upper one
        | small thing "inside" large thing        the large one plain
        | thing "," thing "and" thing             from left to right, sizes not told
thing   = article size texture? colour shape
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from snapcap.models.dataclass import dataclass

SIZES = ("small", "large")
TEXTURES = ("plain", "striped", "dotted", "checkered")  # captions leave "plain" out
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink")
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart", "moon")
CONTAINERS = ("circle", "square", "triangle")  # shapes with room for another shape inside
BACKGROUNDS = ("white", "gray", "black", "sand", "grass")
RELATIONS = ("left of", "right of", "above", "below")
COUNTS = {2: "two", 3: "three", 4: "four"}


@dataclass(frozen=True)
class Thing:
    """An object as captions describe it. Every field is one of the words above."""

    size: str
    texture: str
    colour: str
    shape: str


def _words(thing: Thing, with_size: bool) -> list[str]:
    texture = [] if thing.texture == "plain" else [thing.texture]
    return [*([thing.size] if with_size else []), *texture, thing.colour, thing.shape]


def noun(thing: Thing, with_size: bool = True) -> str:
    """Returns a noun phrase such as "a small striped red circle"."""
    words = _words(thing, with_size)
    return " ".join(["an" if words[0] == "orange" else "a", *words])


def one(thing: Thing, background: str) -> str:
    return f"{noun(thing)} on {background}"


def group(count: int, thing: Thing, background: str) -> str:
    plural = "es" if thing.shape == "cross" else "s"
    return f"{COUNTS[count]} {' '.join(_words(thing, True))}{plural} on {background}"


def pair(first: Thing, relation: str, second: Thing, background: str) -> str:
    return f"{noun(first)} {relation} {noun(second)} on {background}"


def row(left: Thing, middle: Thing, right: Thing, background: str) -> str:
    return f"{noun(left, False)}, {noun(middle, False)} and {noun(right, False)} on {background}"


def things(*sizes: str) -> Iterator[Thing]:
    """Yields every thing of the given sizes, or of all sizes if none is given."""
    return (Thing(*words) for words in product(sizes or SIZES, TEXTURES, COLOURS, SHAPES))


def group_sizes(count: int) -> tuple[str, ...]:
    """Returns the sizes of a group's things. Only a pair can be large, because four large things do not fit into a
    picture."""
    return SIZES if count == 2 else ("small",)


def can_pair(first: Thing, second: Thing) -> bool:
    """Returns whether two things can be a pair. Two things of the same colour and shape would be a group, or
    ambiguous."""
    return (first.colour, first.shape) != (second.colour, second.shape)


def sentences() -> Iterator[str]:
    """Yields every caption: singles and groups, then containers, then pairs and rows (millions)."""
    for thing, background in product(things(), BACKGROUNDS):
        yield one(thing, background)
    for count, background in product(COUNTS, BACKGROUNDS):
        yield from (group(count, thing, background) for thing in things(*group_sizes(count)))
    outers = [thing for thing in things("large") if thing.texture == "plain" and thing.shape in CONTAINERS]
    for inner, outer, background in product(things("small"), outers, BACKGROUNDS):
        if inner.colour != outer.colour:
            yield pair(inner, "inside", outer, background)
    for first, second, background in product(things(), things(), BACKGROUNDS):
        if can_pair(first, second) and first.size in (second.size, "small"):
            relations = RELATIONS if first.size != second.size else ("left of", "above")
            yield from (pair(first, relation, second, background) for relation in relations)
    small = tuple(things("small"))
    for left, middle, right, background in product(small, small, small, BACKGROUNDS):
        if not left == middle == right:
            yield row(left, middle, right, background)
