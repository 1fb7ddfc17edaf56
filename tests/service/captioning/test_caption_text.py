"""Text as a client sees it: however it is cut into pieces, it is the whole text, trimmed, up to the stop."""

import itertools

import pytest

from snapcap.service.captioning.caption_text import CaptionText


def shown(pieces: list[str], *stop: str, keep: bool = False) -> list[str]:
    text = CaptionText(stop, keep_leading_space=keep)
    return [*(text.push(piece) for piece in pieces), text.end()]


def cuts(text: str) -> list[list[str]]:
    """Every way to cut a short text into pieces."""
    return [
        [text[start:end] for start, end in itertools.pairwise((0, *places, len(text)))]
        for size in range(max(len(text), 1))
        for places in itertools.combinations(range(1, len(text)), size)
    ]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (" a red dog ", (), "a red dog"),
        ("abcabcd", ("abcd",), "abc"),
        ("aXbYc", ("Y", "X"), "a"),
        ("aabaaab", ("aaab",), "aab"),
        (" a  b c", (" ",), "a"),  # as the client sees it: the space before the first word is not there
        ("ab\n\ncd", ("\n",), "ab"),
        ("no stop", ("stopped",), "no stop"),
        ("stop", ("stop",), ""),
        ("   ", (), ""),
        ("", ("x",), ""),
    ],
)
def test_the_text_does_not_depend_on_how_it_is_cut(text: str, stop: tuple[str, ...], expected: str) -> None:
    for pieces in cuts(text):
        assert "".join(shown(pieces, *stop)) == expected, pieces


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    assert shown([" a", " red", " dog"]) == ["a", " red", " dog", ""]
    assert shown(["a ", "red ", "dog "]) == ["a", " red", " dog", ""]
    assert shown(["the e", "n", "d"], "end") == ["the", "", "", ""]
    assert shown(["the e", "n", "vy"], "end") == ["the", "", " envy", ""]
    assert shown(["e"], "end") == ["", "e"]


def test_a_continuation_keeps_the_space_before_it() -> None:
    assert shown([" red", " dog "], keep=True) == [" red", " dog", ""]


def test_the_first_stop_in_the_text_counts_and_nothing_follows_it() -> None:
    text = CaptionText(["late", "b"])
    assert text.push("a b late") == "a"
    assert text.stopped
    assert (text.push(" more"), text.end()) == ("", "")
