"""Draws a random scene: which things stand where. A seed gives one scene, which determines its caption.

Lengths are in units of a picture that is 96 wide and 96 high, whatever size it is painted in.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np

from snapcap.models.dataclass import dataclass
from snapcap.models.demo.training import grammar
from snapcap.models.demo.training.grammar import Thing

EXTENT = 96.0
MARGIN = 1.5  # least distance between a thing and the picture's edge, and between two things
SLOPE = 0.45  # a relation is clear if the smaller distance is at most this share of the larger one
RADII = {"small": (12.5, 14.5), "large": (20.0, 23.0)}
LONE_LARGE = (20.0, 34.0)
CONTAINER_RADII = (34.0, 42.0)
KINDS = ("one", "group", "pair", "inside", "row")
KIND_ODDS = (0.17, 0.15, 0.36, 0.12, 0.20)
TRIES = 400

Kind = Literal["one", "group", "pair", "inside", "row"]
# Training and held-out scenes come from disjoint ranges of seeds, so no scene is in both.
SEEDS = {"train": range(0, 10**9), "held_out": range(10**9, 2 * 10**9)}


@dataclass(frozen=True)
class Placed:
    """A thing at (x, y), turned by `angle` radians, within a circle of `radius`."""

    thing: Thing
    x: float
    y: float
    radius: float
    angle: float


@dataclass(frozen=True)
class Scene:
    """The content of a picture. `seed` also determines its light, noise and compression when it is painted."""

    seed: int
    kind: Kind
    background: str
    placed: tuple[Placed, ...]

    @property
    def caption(self) -> str:
        """The sentence that describes the scene."""
        seen = self.placed
        if self.kind == "one":
            return grammar.one(seen[0].thing, self.background)
        if self.kind == "group":
            return grammar.group(len(seen), seen[0].thing, self.background)
        if self.kind == "inside":
            return grammar.pair(seen[1].thing, "inside", seen[0].thing, self.background)
        if self.kind == "row":
            left, middle, right = sorted(seen, key=lambda placed: placed.x)
            return grammar.row(left.thing, middle.thing, right.thing, self.background)
        first, second = sorted(seen, key=lambda placed: (placed.thing.size == "large", placed.x + placed.y))
        return grammar.pair(first.thing, relation(first, second), second.thing, self.background)


def scene_of(split: str, index: int) -> Scene:
    """Returns scene number `index` of a split, "train" or "held_out".

    Raises:
        IndexError: `index` is outside the split's range of seeds.
    """
    return sample_scene(SEEDS[split][index])


def relation(first: Placed, second: Placed) -> str:
    """Returns the relation of `first` to `second`."""
    dx, dy = first.x - second.x, first.y - second.y
    if abs(dx) > abs(dy):
        return "left of" if dx < 0 else "right of"
    return "above" if dy < 0 else "below"


def sample_scene(seed: int) -> Scene:
    """Draws the scene of a seed. A seed gives the same scene every time."""
    lots = np.random.default_rng(seed)
    kind = KINDS[int(lots.choice(len(KINDS), p=KIND_ODDS))]
    background = _pick(lots, grammar.BACKGROUNDS)
    layout = {"one": _one, "group": _group, "pair": _pair, "inside": _inside, "row": _row}[kind]
    placed = layout(lots)
    while placed is None:  # the drawn things did not fit, so others are drawn
        placed = layout(lots)
    return Scene(seed, kind, background, placed)  # type: ignore[arg-type]


def _pick(lots: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[int(lots.integers(len(words)))]


def _thing(lots: np.random.Generator, size: str | None = None) -> Thing:
    texture = "plain" if lots.random() < 0.4 else _pick(lots, grammar.TEXTURES[1:])
    colour, shape = _pick(lots, grammar.COLOURS), _pick(lots, grammar.SHAPES)
    return Thing(size or _pick(lots, grammar.SIZES), texture, colour, shape)


def _place(lots: np.random.Generator, thing: Thing, radii: tuple[float, float] | None = None) -> Placed:
    radius = lots.uniform(*(radii or RADII[thing.size]))
    x, y = lots.uniform(radius + MARGIN, EXTENT - radius - MARGIN, 2)
    return Placed(thing, x, y, radius, lots.uniform(0, 2 * np.pi))


def _apart(a: Placed, b: Placed) -> bool:
    return bool(np.hypot(a.x - b.x, a.y - b.y) >= a.radius + b.radius + MARGIN)


def _one(lots: np.random.Generator) -> tuple[Placed, ...] | None:
    thing = _thing(lots)
    return (_place(lots, thing, LONE_LARGE if thing.size == "large" else None),)


def _group(lots: np.random.Generator) -> tuple[Placed, ...] | None:
    count = int(lots.choice(list(grammar.COUNTS)))
    thing = _thing(lots, _pick(lots, grammar.group_sizes(count)))
    placed: list[Placed] = []
    for _ in range(TRIES):
        candidate = _place(lots, thing)
        if all(_apart(candidate, other) for other in placed):
            placed.append(candidate)
        if len(placed) == count:
            return tuple(placed)
    return None


def _pair(lots: np.random.Generator) -> tuple[Placed, ...] | None:
    first, second = _thing(lots), _thing(lots)
    if not grammar.can_pair(first, second):
        return None
    for _ in range(TRIES):
        a, b = _place(lots, first), _place(lots, second)
        near, far = sorted((abs(a.x - b.x), abs(a.y - b.y)))
        if _apart(a, b) and near <= SLOPE * far:
            return a, b
    return None


def _inside(lots: np.random.Generator) -> tuple[Placed, ...] | None:
    inner = _thing(lots, "small")
    outer = Thing("large", "plain", _pick(lots, grammar.COLOURS), _pick(lots, grammar.CONTAINERS))
    if inner.colour == outer.colour:
        return None
    around = _place(lots, outer, CONTAINER_RADII)
    inscribed = {"circle": 0.9, "square": 0.7, "triangle": 0.5}[outer.shape]
    room = inscribed * around.radius
    radius = lots.uniform(*RADII["small"])
    away = lots.uniform(0, max(0.0, room - radius - MARGIN))
    towards, angle = lots.uniform(0, 2 * np.pi, 2)
    x, y = around.x + away * np.cos(towards), around.y + away * np.sin(towards)
    return around, Placed(inner, x, y, radius, angle)


def _row(lots: np.random.Generator) -> tuple[Placed, ...] | None:
    drawn = [_thing(lots, "small") for _ in range(3)]
    if drawn[0] == drawn[1] == drawn[2]:
        return None
    for _ in range(TRIES):
        placed = sorted((_place(lots, thing) for thing in drawn), key=lambda item: item.x)
        steps = [right.x - left.x for left, right in pairwise(placed)]
        if min(steps) >= 20 and all(_apart(a, b) for a, b in pairwise(placed)):
            return tuple(placed)
    return None
