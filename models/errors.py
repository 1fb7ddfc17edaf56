"""Defines what all layers say of a user's mistakes: the base class of errors that one can mend, and a guess."""

from collections.abc import Iterable


class UserError(RuntimeError):
    """What went wrong is for whoever runs the program to mend; the text is one line that says how."""


class PromptError(ValueError):
    """A request's text that a model cannot take; the message goes after "must", as in "not begin with a space"."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing when no known word is close."""
    import difflib  # noqa: PLC0415 - of mistakes only: each process of a server imports this module

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
