"""Renames the tensors of a family's checkpoints to snapcap's names, by tables of patterns.

Dimensions and families both import it, so it stands before either.
"""

import re
from collections.abc import Iterable

from snapcap.models.dataclass import dataclass

Rule = tuple[str, str]  # a pattern for the whole name, and what replaces it

# Snapcap's names of the head's tensors, which may be tied to others of the checkpoint.
HEADS = ("decoder.lm_head.weight", "decoder.head.weight", "decoder.head.bias")


@dataclass(frozen=True)
class Names:
    """The tensors of a checkpoint. ``unused``: patterns of those that captioning has no need of."""

    rules: tuple[Rule, ...]
    unused: tuple[str, ...] = ()

    def __add__(self, other: "Names") -> "Names":
        return Names(self.rules + other.rules, self.unused + other.unused)

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        """Snapcap's name of each; the unused are left out, and an unknown one stays as it is."""
        rules = [(re.compile(pattern), target) for pattern, target in self.rules]
        unused = [re.compile(pattern) for pattern in self.unused]
        return {
            name: _renamed(name, rules) for name in names if not any(pattern.fullmatch(name) for pattern in unused)
        }


def _renamed(name: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, target in rules:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(target)
    return name
