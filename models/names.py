"""Renames the tensors of a family's checkpoints to snapcap's names, by tables of patterns, and back for messages.

Dimensions and families both import it, so it stands before either.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import product

from snapcap.models.dataclass import dataclass

Rule = tuple[str, str]  # a pattern for the whole name, and what replaces it

_HEADS = ("decoder.lm_head.weight", "decoder.head.weight")
# Snapcap's names of tensors that may be tied: a checkpoint has such a tensor under any of them, or several.
_TIES = (
    ("decoder.wte.weight", "decoder.lm_head.weight"),
    # Florence-2 has an embedding that encoder, decoder and head share.
    ("decoder.token", "decoder.head.weight", "decoder.own_token", "text_encoder.token"),
    ("decoder.head.shared_bias", "decoder.head.bias"),
)
# What wraps a module puts before the names of its tensors: torch.compile, FSDP, DistributedDataParallel and PEFT.
_INNER_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_OUTER_WRAPPERS = re.compile(r"(?:module\.|base_model\.model\.)+")
# TensorFlow's names of a norm's two tensors, which transformers renames.
_LEGACY_NORM = re.compile(r"(?<=LayerNorm\.)(?:gamma|beta)$")
# The parts of a pattern: a choice of texts, a group, a letter with a backslash, any other letter.
_PATTERN_PART = re.compile(r"\(\?:([^()]*)\)(\?)?|\(([^()]*)\)|\\(.)|(.)")
_REFERENCE = re.compile(r"\\(\d)")


def ties(tied_head: bool) -> tuple[tuple[str, ...], ...]:
    """The names, snapcap's, under which one tensor may be; the first of each is that under which it is used."""
    return tuple(tuple(name for name in names if tied_head or name not in _HEADS) for names in _TIES)


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
        found = {}
        for name in names:
            plain = _plain(name)
            if not any(pattern.fullmatch(plain) for pattern in unused):
                found[name] = _renamed(plain, rules)
        return found

    def original(self, ours: str, present: Iterable[str]) -> str:
        """The name of a tensor, given snapcap's, in a checkpoint that has the tensors ``present``: of several names
        the one that differs least from one that is there."""
        tied = next((names for names in _TIES if ours in names), ())
        # A family may have no rule for the one name of a tied tensor, as GIT's head has one bias.
        known = ([each for rule in self.rules for each in _spellings(rule, name)] for name in (ours, *tied))
        spelled = next(filter(None, known), [ours])
        pairs = [(name, each) for name in spelled for each in present] or [(ours, "")]
        name, like = min(pairs, key=lambda pair: _difference(pair[0], _plain(pair[1])))
        outer = _OUTER_WRAPPERS.match(like)
        return f"{outer[0] if outer else ''}{name}"


def _difference(one: str, other: str) -> int:
    """The letters between what two names begin and end with alike."""
    begin = _alike(one, other)
    one, other = one[begin:], other[begin:]
    return len(one) + len(other) - 2 * _alike(one[::-1], other[::-1])


def _alike(one: str, other: str) -> int:
    """The letters that two names begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _plain(name: str) -> str:
    """A name without what wraps modules, and with today's names of a norm's tensors."""
    name = _INNER_WRAPPERS.sub("", name)
    outer = _OUTER_WRAPPERS.match(name)
    if outer:
        name = name[outer.end() :]
    return _LEGACY_NORM.sub(lambda match: "weight" if match[0] == "gamma" else "bias", name)


def _renamed(name: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, target in rules:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(target)
    return name


def _spellings(rule: Rule, ours: str) -> Iterator[str]:
    """Every name that a rule renames to one of snapcap's."""
    pattern, target = rule
    parts: list[tuple[str, ...]] = []
    groups: list[str] = []
    for choice, optional, group, escaped, letter in _PATTERN_PART.findall(pattern):
        if group:
            groups.append(group)
            parts.append((f"\\{len(groups)}",))
        elif choice:
            texts = tuple(text.replace("\\", "") for text in choice.split("|"))
            parts.append((*texts, "") if optional else texts)
        else:
            parts.append((escaped or letter,))
    wanted = _REFERENCE.sub(
        lambda match: f"(?P<g{match[1]}>{groups[int(match[1]) - 1]})", target.replace(".", "\\.")
    )
    match = re.fullmatch(wanted, ours)
    if match:
        for each in product(*parts):
            yield _REFERENCE.sub(lambda reference: match[f"g{reference[1]}"], "".join(each))
