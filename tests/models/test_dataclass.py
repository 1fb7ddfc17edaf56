"""Dataclasses whose methods are shared do what the standard library's do."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field, replace
from typing import Any, ClassVar

import pytest

from snapcap.models.dataclass import dataclass as ours

Decorator = Callable[..., Any]


def classes(dataclass: Decorator) -> dict[str, Any]:
    """The kinds of classes that there are here, made by either decorator."""

    @dataclass(frozen=True)
    class Frozen:
        """Of all that a field may be."""

        number: int
        text: str = "a"
        many: list[int] = field(default_factory=list)
        hidden: int = field(default=3, repr=False)
        apart: int = field(default=4, compare=False)
        shared: ClassVar[int] = 5

        @property
        def double(self) -> int:
            return self.number * 2

    @dataclass(frozen=True, kw_only=True)
    class Base:
        """Named only."""

        width: int
        heads: int = 2

    @dataclass(frozen=True, kw_only=True)
    class Derived(Base):
        """With what its base has."""

        heads: int = 4
        depth: int

    @dataclass
    class Open:
        """May be written, and cannot be a key."""

        number: int = 1
        made: int = field(init=False)
        kept: list[int] = field(init=False, default_factory=list)

        def __post_init__(self) -> None:
            self.made = self.number + 1

    @dataclass(eq=False)
    class Identity:
        """Equal to itself alone."""

        number: int

    @dataclass(frozen=True)
    class Own:
        """Has methods of its own."""

        number: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and abs(self.number) == abs(other.number)

        def __hash__(self) -> int:
            return abs(self.number)

        def __repr__(self) -> str:
            return "own"

    @dataclass(frozen=True)
    class Empty:
        """Without fields."""

    @dataclass(frozen=True)
    class One:
        """A key of one number."""

        size: int

    kinds = (Frozen, Base, Derived, Open, Identity, Own, Empty, One)
    return {kind.__name__: kind for kind in kinds}


OURS, STANDARD = classes(ours), classes(dataclasses.dataclass)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Frozen", (1,), {}),
    ("Frozen", (1, "b", [2]), {"hidden": 7}),
    ("Frozen", (), {"text": "c", "number": 2, "apart": 9}),
    ("Derived", (), {"width": 1, "depth": 2}),
    ("Derived", (), {"width": 1, "depth": 2, "heads": 3}),
    ("Open", (), {}),
    ("Open", (4,), {}),
    ("Identity", (1,), {}),
    ("Own", (-1,), {}),
    ("Empty", (), {}),
    ("One", (4,), {}),
]
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Frozen", (), {}),
    ("Frozen", (1, "a", [], 1, 2, 3), {}),
    ("Frozen", (1,), {"number": 2}),
    ("Frozen", (1,), {"other": 2}),
    ("Derived", (1,), {"depth": 2}),
    ("Derived", (), {"width": 1}),
    ("Open", (), {"made": 1}),
    ("Empty", (1,), {}),
]


def outcome(call: Callable[[], Any]) -> Any:
    """What it returns, or the kind of what it raises."""
    try:
        return call()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize(("name", "given", "named"), CALLS, ids=str)
def test_objects_are_the_standard_ones(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    seen = []
    for kinds in (OURS, STANDARD):
        made, again = (kinds[name](*given, **copy.deepcopy(named)) for _ in range(2))
        seen.append(
            {
                "values": vars(made),
                "as a dictionary": dataclasses.asdict(made),
                "shown": repr(made).replace("classes.<locals>.", "") if name != "Identity" else "",
                "equal": made == again,
                "equal to another": [made == 1, made == kinds["One"](1), made != again],
                "hashed alike": outcome(lambda made=made, again=again: hash(made) == hash(again)),
                "written": outcome(lambda made=made: setattr(made, "number", 8)),
                "deleted": outcome(lambda made=made: delattr(made, "number")),
                "fields": [(each.name, each.init, each.kw_only) for each in dataclasses.fields(made)],
                "match": kinds[name].__match_args__,
                "document": kinds[name].__doc__,
            }
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("name", "given", "named"), WRONG, ids=str)
def test_wrong_arguments_are_refused_in_the_same_words(
    name: str, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    messages = []
    for kinds in (OURS, STANDARD):
        with pytest.raises(TypeError, match=r"__init__\(\) ") as raised:
            kinds[name](*given, **named)
        messages.append(str(raised.value).partition("__init__()")[2])
    ours, standard = messages
    assert ours.split()[0] == standard.split()[0]  # takes, got or missing
    if ours.startswith(" got"):
        assert ours == standard


def test_comparisons_heed_what_fields_say() -> None:
    for kinds in (OURS, STANDARD):
        frozen = kinds["Frozen"]
        assert frozen(1, apart=1) == frozen(1, apart=2)
        assert frozen(1, hidden=1) != frozen(1, hidden=2)
        assert kinds["Own"](1) == kinds["Own"](-1)
        assert len({kinds["One"](1), kinds["One"](1), kinds["One"](2)}) == 2
        assert frozen(1).many is not frozen(1).many


def test_replace_keeps_the_rest() -> None:
    changed = replace(OURS["Derived"](width=1, depth=2, heads=3), depth=5)
    assert (changed.width, changed.depth, changed.heads) == (1, 5, 3)
    with pytest.raises(TypeError):
        replace(changed, other=1)


def test_an_object_that_has_itself_is_shown() -> None:
    made = OURS["Open"]()
    made.kept.append(made)
    assert "..." in repr(made)


@ours(frozen=True)
class Pickled:
    """At a module's level, where pickle finds it."""

    number: int
    text: str = "a"


def test_copies_and_pickles_are_equal() -> None:
    made = Pickled(1)
    assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made)


def test_a_class_without_the_decorator_inherits_what_its_base_does() -> None:
    class Child(Pickled):
        pass

    assert Child(2) == Child(2)
    assert Child(2) != Pickled(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Child(2).number = 3  # type: ignore[misc]
