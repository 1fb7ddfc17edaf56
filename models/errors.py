"""Defines what all layers say of a user's mistakes: the base class of errors that one can mend, and a guess."""

from collections.abc import Iterable


class UserError(RuntimeError):
    """What went wrong is for whoever runs the program to mend; the text is one line that says how."""


class PromptError(ValueError):
    """A request's text that a model cannot take; the message goes after "must", as in "not begin with a space"."""


class TokenizerFailed(PromptError):  # noqa: N818  the name says what happened
    """The tokenizer's library failed at a text. ``cause``: the failure in the library's words, for the log."""

    def __init__(self, cause: str) -> None:
        super().__init__("be text that the model's tokenizer can read; the tokenizer failed at this text")
        self.cause = cause


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing when no known word is close."""
    import difflib  # noqa: PLC0415 - of mistakes only: each process of a server imports this module

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
