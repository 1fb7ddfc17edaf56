"""Defines what all layers say of a user's mistakes: the base class of errors that one can mend, and a guess."""

from collections.abc import Iterable

_AS_NEAR = 0.1  # of difflib's ratio: a word that is further behind the nearest is not meant
_PART = 5  # characters of a part of a word that says which word is meant: `top` and `max` do not


class UserError(RuntimeError):
    """What went wrong is for whoever runs the program to mend; the text is one line that says how."""


class PromptError(ValueError):
    """A request's text that a model cannot take; the message goes after "must", as in "not begin with a space"."""


class TokenizerFailed(PromptError):  # noqa: N818  the name says what happened
    """The tokenizer's library failed at a text. ``cause``: the failure in the library's words, for the log."""

    def __init__(self, cause: str) -> None:
        super().__init__("be text that the model's tokenizer can read; the tokenizer failed at this text")
        self.cause = cause


def near_words(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The known words that a word may be a mistake for, up to three, the nearest first.

    They are spelled nearly so, by difflib's ratio from `cutoff` on, have the same letters in another order, or have
    the word as a part, as `num_beams` has `beams`."""
    import difflib  # noqa: PLC0415 - of mistakes only: each process of a server imports this module

    asked, names = _plain(word), {_plain(name): name for name in known}
    ratios = {
        name: difflib.SequenceMatcher(None, asked, name).ratio()
        for name in difflib.get_close_matches(asked, names, n=3, cutoff=cutoff)
    }
    near = [name for name, ratio in ratios.items() if ratio > max(ratios.values()) - _AS_NEAR]
    for name in names:
        within = len(asked) >= _PART and f"_{asked}_" in f"_{name}_"
        if name not in ratios and (within or (len(asked) == len(name) and sorted(asked) == sorted(name))):
            near.append(name)
    return [names[name] for name in near[:3]]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def suggestion(word: str, known: Iterable[str], most: int = 1) -> str:
    """ "; did you mean X?", with up to `most` words, or nothing when no known word is near."""
    near = near_words(word, known)[:most]
    return f"; did you mean {' or '.join(near)}?" if near else ""
