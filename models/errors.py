"""Defines the base class of errors that a user can fix, and errors of texts; guesses misspelled words."""

from collections.abc import Iterable

_AS_NEAR = 0.1  # greatest distance of difflib's ratio from the nearest word's; more distant words are not suggested
_PART = 5  # least characters of a word to be found as a part of another; `top` and `max` are too short


class UserError(RuntimeError):
    """An error that whoever runs the program can fix. The message is one line that says how."""


class WeightsError(UserError):
    """Weights that cannot be read or do not fit the model. The message is one line that says what is wrong and
    where."""


class PromptError(ValueError):
    """A request's text that a model cannot take. The message goes after "must", as in "not begin with a space"."""


class TokenizerFailed(PromptError):  # noqa: N818 - the name says what happened
    """The tokenizer's library failed on a text. ``cause`` is the failure in the library's words, for the log."""

    def __init__(self, cause: str) -> None:
        super().__init__("be text that the model's tokenizer can read; the tokenizer failed at this text")
        self.cause = cause


def headline(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class. Texts of torch can fill a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def near_words(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Returns up to three known words for which a word may be a mistake, the nearest first.

    A word is near if its spelling is similar (difflib's ratio is at least `cutoff`), if its letters are the same in
    another order, or if it contains the given word as a part, as `num_beams` contains `beams`.
    """
    import difflib  # noqa: PLC0415 - only for mistakes: each process of a server imports this module

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
    """Returns "; did you mean X?", with up to `most` words, or "" if no known word is near."""
    near = near_words(word, known)[:most]
    return f"; did you mean {' or '.join(near)}?" if near else ""
