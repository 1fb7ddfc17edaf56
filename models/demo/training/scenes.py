"""Draws a random scene: which things stand where. A seed gives one scene, which determines its caption.

    caption = scene "on" background
    scene   = thing                                   one thing
            | count things                            two to four equal things
            | thing relation thing                    the smaller first; of equal sizes the left or upper one
            | small thing "inside" large thing        the large one plain
            | thing "," thing "and" thing             from left to right, sizes not told
    thing   = article size texture? colour shape

Lengths are in units of a picture that is 96 wide and 96 high, whatever size it is painted in.
"""

from itertools import pairwise

import numpy as np

from snapcap.models.dataclass import dataclass

SIZES = ("small", "large")
TEXTURES = ("plain", "striped", "dotted", "checkered")  # captions leave "plain" out
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink")
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart", "moon")
CONTAINERS = {"circle": 0.9, "square": 0.7, "triangle": 0.5}  # radius of the circle that fits inside a shape
BACKGROUNDS = ("white", "gray", "black", "sand", "grass")
COUNTS = {2: "two", 3: "three", 4: "four"}

EXTENT = 96.0
MARGIN = 1.5  # least distance between a thing and the picture's edge, and between two things
SLOPE = 0.45  # a relation is clear if the smaller distance is at most this share of the larger one
RADII = {"small": (12.5, 14.5), "large": (20.0, 23.0)}
LONE_LARGE = (20.0, 34.0)
CONTAINER_RADII = (34.0, 42.0)
TRIES = 400
# Training and held-out scenes come from disjoint ranges of seeds, so no scene is in both.
SEEDS = {"train": range(0, 10**9), "held_out": range(10**9, 2 * 10**9)}


@dataclass(frozen=True)
class Thing:
    """An object as captions describe it. Every field is one of the words above."""

    size: str
    texture: str
    colour: str
    shape: str

    def words(self, with_size: bool = True) -> str:
        """Returns the thing's words, such as "small striped red circle"."""
        words = self.size if with_size else "", self.texture.replace("plain", ""), self.colour, self.shape
        return " ".join(filter(None, words))

    def noun(self, with_size: bool = True) -> str:
        """Returns a noun phrase such as "a small striped red circle"."""
        words = self.words(with_size)
        return f"{'an' if words.startswith('orange') else 'a'} {words}"


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
    kind: str
    background: str
    placed: tuple[Placed, ...]

    @property
    def caption(self) -> str:
        """The sentence that describes the scene."""
        return f"{self._phrase} on {self.background}"

    @property
    def _phrase(self) -> str:
        seen = self.placed
        thing = seen[0].thing
        match self.kind:
            case "one":
                return thing.noun()
            case "group":
                return f"{COUNTS[len(seen)]} {thing.words()}{'es' if thing.shape == 'cross' else 's'}"
            case "inside":
                return f"{seen[1].thing.noun()} inside {thing.noun()}"
            case "row":
                left, middle, right = (each.thing.noun(False) for each in sorted(seen, key=lambda each: each.x))
                return f"{left}, {middle} and {right}"
        first, second = sorted(seen, key=lambda each: (each.thing.size == "large", each.x + each.y))
        dx, dy = first.x - second.x, first.y - second.y
        across, down = "left of" if dx < 0 else "right of", "above" if dy < 0 else "below"
        return f"{first.thing.noun()} {across if abs(dx) > abs(dy) else down} {second.thing.noun()}"


def scene_of(split: str, index: int) -> Scene:
    """Returns scene number `index` of a split, "train" or "held_out", which is the same every time.
    Raises IndexError if `index` is outside the split's range of seeds."""
    seed = SEEDS[split][index]
    lots = np.random.default_rng(seed)
    kind = [*_KINDS][int(lots.choice(len(_KINDS), p=[odds for odds, _ in _KINDS.values()]))]
    background, (_, place) = _pick(lots, BACKGROUNDS), _KINDS[kind]
    placed = place(lots)
    while placed is None:  # the drawn things did not fit, so others are drawn
        placed = place(lots)
    return Scene(seed, kind, background, placed)


def _pick(lots: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[int(lots.integers(len(words)))]


def _thing(lots: np.random.Generator, size: str | None = None) -> Thing:
    texture = "plain" if lots.random() < 0.4 else _pick(lots, TEXTURES[1:])
    colour, shape = _pick(lots, COLOURS), _pick(lots, SHAPES)
    return Thing(size or _pick(lots, SIZES), texture, colour, shape)


def _place(lots: np.random.Generator, thing: Thing, radii: tuple[float, float] | None = None) -> Placed:
    radius = lots.uniform(*(radii or RADII[thing.size]))
    x, y = lots.uniform(radius + MARGIN, EXTENT - radius - MARGIN, 2)
    return Placed(thing, x, y, radius, lots.uniform(0, 2 * np.pi))


def _apart(a: Placed, b: Placed) -> bool:
    return bool(np.hypot(a.x - b.x, a.y - b.y) >= a.radius + b.radius + MARGIN)


def _one(lots: np.random.Generator) -> tuple[Placed, ...]:
    thing = _thing(lots)
    return (_place(lots, thing, LONE_LARGE if thing.size == "large" else None),)


def _group(lots: np.random.Generator) -> tuple[Placed, ...] | None:
    count = int(lots.choice(list(COUNTS)))
    thing = _thing(lots, _pick(lots, SIZES if count == 2 else ("small",)))  # more large things do not fit
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
    if (first.colour, first.shape) == (second.colour, second.shape):  # a group, or ambiguous
        return None
    for _ in range(TRIES):
        a, b = _place(lots, first), _place(lots, second)
        near, far = sorted((abs(a.x - b.x), abs(a.y - b.y)))
        if _apart(a, b) and near <= SLOPE * far:
            return a, b
    return None


def _inside(lots: np.random.Generator) -> tuple[Placed, ...] | None:
    inner = _thing(lots, "small")
    outer = Thing("large", "plain", _pick(lots, COLOURS), _pick(lots, tuple(CONTAINERS)))
    if inner.colour == outer.colour:
        return None
    around = _place(lots, outer, CONTAINER_RADII)
    room = CONTAINERS[outer.shape] * around.radius
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


# The odds of each kind of scene, and the function that places its things, or returns None if they do not fit.
_KINDS = {
    "one": (0.17, _one),
    "group": (0.15, _group),
    "pair": (0.36, _pair),
    "inside": (0.12, _inside),
    "row": (0.20, _row),
}
