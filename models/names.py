"""Renames the tensors of a family's checkpoints to snapcap's names by tables of patterns, and back for messages.

The tables of patterns are in `models.families`. The dimensions import this module too, and no family.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import product
from os.path import commonprefix

from snapcap.models.dataclass import dataclass

Rule = tuple[str, str]  # a pattern for the whole name, and its replacement

_HEADS = ("decoder.lm_head.weight", "decoder.head.weight")
# Snapcap's names of tensors that may be tied. A checkpoint has such a tensor under one or several of the names.
_TIES = (
    ("decoder.wte.weight", "decoder.lm_head.weight"),
    # Florence-2's encoder, decoder and head share an embedding.
    ("decoder.token", "decoder.head.weight", "decoder.own_token", "text_encoder.token"),
    ("decoder.head.shared_bias", "decoder.head.bias"),
)
# Prefixes that wrappers of modules add to tensors' names: torch.compile, FSDP, DistributedDataParallel and PEFT.
_INNER_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_OUTER_WRAPPERS = re.compile(r"(?:module\.|base_model\.model\.)+")
# TensorFlow's names of a norm's two tensors, which transformers renames.
_LEGACY_NORM = re.compile(r"(?<=LayerNorm\.)(?:gamma|beta)$")
# The parts of a pattern: a choice of texts, a group, a letter with a backslash, any other letter.
_PATTERN_PART = re.compile(r"\(\?:([^()]*)\)(\?)?|\(([^()]*)\)|\\(.)|(.)")
_REFERENCE = re.compile(r"\\(\d)")


def ties(tied_head: bool) -> tuple[tuple[str, ...], ...]:
    """Returns groups of snapcap's names of one tensor. Regions use a tensor under the first name of its group."""
    return tuple(tuple(name for name in names if tied_head or name not in _HEADS) for names in _TIES)


@dataclass(frozen=True)
class Names:
    """The names of a checkpoint's tensors. ``unused`` holds patterns of tensors that captioning does not need."""

    rules: tuple[Rule, ...]
    unused: tuple[str, ...] = ()

    def __add__(self, other: "Names") -> "Names":
        return Names(self.rules + other.rules, self.unused + other.unused)

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        """Returns snapcap's name of each tensor, without unused tensors. An unknown name stays as it is."""
        rules = [(re.compile(pattern), target) for pattern, target in self.rules]
        unused = [re.compile(pattern) for pattern in self.unused]
        found = {}
        for name in names:
            plain = _plain(name)
            if not any(pattern.fullmatch(plain) for pattern in unused):
                found[name] = _renamed(plain, rules)
        return found

    def original(self, ours: str, present: Iterable[str]) -> str:
        """Returns the checkpoint's name of a tensor, from snapcap's name and the names that are ``present``.

        If several names are possible, the one most similar to a present name is returned.
        """
        tied = next((names for names in _TIES if ours in names), ())
        # A family may lack a rule for one of the names of a tied tensor: GIT's head has only one bias.
        known = ([each for rule in self.rules for each in _spellings(rule, name)] for name in (ours, *tied))
        spelled = next(filter(None, known), [ours])
        pairs = [(name, each) for name in spelled for each in present] or [(ours, "")]
        name, like = min(pairs, key=lambda pair: _difference(pair[0], _plain(pair[1])))
        outer = _OUTER_WRAPPERS.match(like)
        return f"{outer[0] if outer else ''}{name}"


def _difference(one: str, other: str) -> int:
    """Returns the number of letters of two names outside of their common beginning and end."""
    begin = len(commonprefix([one, other]))  # noqa: RUF071 - letters are meant, not paths
    one, other = one[begin:], other[begin:]
    end = len(commonprefix([one[::-1], other[::-1]]))  # noqa: RUF071 - likewise
    return len(one) + len(other) - 2 * end


def _plain(name: str) -> str:
    """Returns a name without wrappers' prefixes, and with today's names of a norm's tensors."""
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
    """Yields every name that a rule renames to one of snapcap's names."""
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
