"""Captions for alt text: which beginnings go, where a long caption ends, and that a stream gives the same text."""

import random
import time

import pytest

from snapcap.service.captioning.caption_text import FEWEST_CHARS, Style, StyledText
from snapcap.service.captioning.options import OPTIONS

LEAD = Style(trim_lead=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a picture of a dog", "a dog"),
        ("A photo of a dog.", "A dog."),
        ("an image of two cats", "two cats"),
        ("The image shows a cat", "A cat"),
        ("This image depicts: a cat", "A cat"),
        ("the photograph appears to show a cat", "a cat"),
        ("In this picture, we can see a cat.", "A cat."),
        ("In the image there are two cats.", "Two cats."),
        ("This is a photo of Paris", "Paris"),
        ("Here is an image showing élan", "Élan"),
        ("image of a cat", "a cat"),
        ("The image is of a cat", "A cat"),
        # These words belong to the picture, or nothing would be left.
        ("a picture frame on a wall", "a picture frame on a wall"),
        ("a man takes a picture of a dog", "a man takes a picture of a dog"),
        ("a black and white photo of a man", "a black and white photo of a man"),
        ("a picture of", "a picture of"),
        ("a picture of   ", "a picture of   "),
        ("", ""),
    ],
)
def test_the_beginning_that_says_that_it_is_a_picture_goes(text: str, expected: str) -> None:
    assert LEAD.applied(text) == expected
    assert Style().applied(text) == text


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("a dog sits here", 16, "a dog sits here"),
        ("a dog sits here.", 16, "a dog sits here."),
        ("a dog sits here. It barks.", 16, "a dog sits here."),
        ("a dog sits there. It barks.", 16, "a dog sits"),
        ("A dog sits. It barks. It runs away and comes back.", 24, "A dog sits. It barks."),
        ("A dog sits on a long bench, near a tree", 28, "A dog sits on a long bench"),
        ("A dog! Or is it a cat? Nobody knows", 25, "A dog! Or is it a cat?"),
        ('A sign says "Stop here." A car waits behind it', 30, 'A sign says "Stop here."'),
        ("Beside Mr. Smith and J. Doe is a dog.", 30, "Beside Mr. Smith and J. Doe is"),
        ("A view of Mt. Fuji behind a lake with boats", 24, "A view of Mt. Fuji"),
        ("A player with No. 5 on the back runs", 20, "A player with No. 5"),
        ("Beside Capt. Lee and Sgt. Fox Jr. is a dog.", 34, "Beside Capt. Lee and Sgt. Fox Jr."),
        ("A sign of 3.5 tons for all lorries", 20, "A sign of 3.5 tons"),
        ("well-known landmarks of Paris", 17, "well-known"),
        ("line one\nline two and three", 18, "line one\nline two"),
        ("一只狗坐在公园的长凳上。旁边有一棵很大的树和一只猫。", 20, "一只狗坐在公园的长凳上。"),
        ("一只狗坐在公园的长凳上旁边有一棵很大的树和一只猫", 16, "一只狗坐在公园的长凳上旁边有一棵"),
        ("一只狗坐在公园里的旧木头长凳上，旁边有一棵很大的树", 16, "一只狗坐在公园里的旧木头长凳上"),
        ("고양이 한 마리가 파란 소파 위에서 자고 있습니다", 18, "고양이 한 마리가 파란 소파"),
        ("pneumonoultramicroscopic dust", 16, ""),
    ],
)
def test_a_long_caption_ends_with_a_sentence_or_a_word(text: str, most: int, expected: str) -> None:
    shown = Style(most).applied(text)
    assert shown == expected
    assert len(shown) <= most
    assert Style(len(text)).applied(text) == text


def test_what_stays_counts_without_the_beginning_that_goes() -> None:
    text = "A picture of a dog that sits. It barks."
    assert Style(16, trim_lead=True).applied(text) == "A dog that sits."
    assert Style(16).applied(text) == "A picture of a"


STYLES = [LEAD, Style(16), Style(40), Style(40, trim_lead=True), Style(200, trim_lead=True)]
TEXTS = [
    "",
    "a dog",
    "A picture of a dog.",
    "This image shows a dog that sits on a bench. It barks at the tree. Nobody hears it, but for the cat behind.",
    "a photo of " + "very " * 30 + "old trees",
]


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
@pytest.mark.parametrize("before", ["", "A picture", "This image shows a dog that"])
def test_a_stream_gives_what_a_whole_caption_has_after_the_prompt(style: Style, text: str, before: str) -> None:
    """However the text is cut into pieces."""
    if before and not text.startswith(before):
        text = f"{before} {text}".rstrip()
    rest, whole = text[len(before) :], style.applied(text)
    chance = random.Random(5)
    for _ in range(20):
        shown = StyledText(style, before, (), keep_leading_space=bool(before))
        pieces, at = [], 0
        while at < len(rest):
            size = chance.randint(1, 12)
            pieces.append(shown.push(rest[at : at + size]))
            at += size
        streamed = "".join([*pieces, shown.end()])
        assert whole.endswith(streamed)
        start, end = style.span(text)
        assert len(streamed) == max(end - max(start, len(before)), 0)


def test_a_stream_ends_at_a_stop_sequence_whatever_it_holds_back() -> None:
    for style in STYLES:
        shown = StyledText(style, "", ("barks",), keep_leading_space=False)
        streamed = shown.push(" A photo of a dog.") + shown.push(" It bar") + shown.push("ks at me")
        assert shown.stopped
        assert streamed + shown.end() == style.applied("A photo of a dog. It")


def test_a_stream_waits_for_its_beginning_only() -> None:
    shown = StyledText(LEAD, "", (), keep_leading_space=False)
    assert shown.push("A photo of " + "many " * 9) == ""
    assert shown.push("many old trees") == "Many " + "many " * 9 + "old trees"
    assert shown.push(" by") + shown.push(" the") == " by the"


def test_fewer_characters_than_a_word_are_refused() -> None:
    assert OPTIONS["max_chars"].kind.low == FEWEST_CHARS  # type: ignore[union-attr]


def test_the_time_grows_with_the_length_of_a_run_of_marks_and_not_with_its_square() -> None:
    """A prompt of 10,000 points is a caption's beginning; the event loop cuts the caption."""
    text = "." * 20_000 + "!" * 20_000 + "a dog"
    began = time.thread_time()
    assert Style(max_chars=40_000).applied(text) == text[:0]
    assert time.thread_time() - began < 1.0
