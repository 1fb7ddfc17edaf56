"""Reads the regions that Florence-2 writes as location tokens, as transformers' `Florence2PostProcessor` does.

A location such as ``<loc_500>`` is a thousandth of the picture's width or height. Locations stand behind the text
that they belong to: four make a box, eight the corners of a line of text, any even number an outline. The time of
reading grows with the length of the text alone, because a model can write anything.

Two things differ from transformers. A number above a million counts as a million. An outline without a point, which
is made of one location, is left out.
"""

import re
import struct
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from snapcap.models.text import Region

Size = tuple[int, int]  # (width, height) in pixels

_BINS = 1000
_FURTHEST = 10**6  # beyond this, a location times a pixel is no exact float32
_LEAST = 4  # marks that belong to a text
_CORNERS = 4
_LOCATION = re.compile(r"<loc_(\d+)>")
_MARK = re.compile(r"<loc_(\d+)>|<sep>|<poly>|</poly>")
_SEPARATOR, _BEGIN, _END = "<sep>", "<poly>", "</poly>"
_NOT_READ = ("<s>", "</s>", "<pad>")


def boxes(text: str, size: Size, *, labelled: bool = True, banned: Collection[str] = ()) -> list[Region]:
    """Returns each box, with the text before it if the boxes are ``labelled``. A text may have several boxes.

    banned: texts whose boxes are left out.
    """
    found = []
    for label, run in _phrases(_cleaned(text), _LOCATION, labelled):
        name = label.strip()
        if "\n" in label.lstrip() or name in banned:
            continue
        name = name.encode("ascii", "ignore").decode()
        numbers = [_number(mark[1]) for mark in run]
        for first in range(0, len(numbers) - 3, 4):
            left, top, right, bottom = _pixels(numbers[first : first + 4], size)
            found.append(Region(name, (left, top, right, bottom)))
    return found


def quads(text: str, size: Size, *, least_area: float = 0.0) -> list[Region]:
    """Returns the four corners of each line of text. The label is the line of text.

    least_area: smallest area, as a part of the picture's area.
    """
    found = []
    for line in _cleaned(text).split("\n"):
        begin, marks = 0, list(_LOCATION.finditer(line))
        for index, first in enumerate(marks):
            eight = marks[index : index + 2 * _CORNERS]
            length = sum(len(mark[0]) for mark in eight)
            if first.start() <= begin or len(eight) < 2 * _CORNERS or eight[-1].end() - first.start() != length:
                continue
            corners = _pixels([_number(mark[1]) for mark in eight], size)
            if not least_area or _area(corners) >= size[0] * size[1] * least_area:
                found.append(_outlined(line[begin : first.start()].strip(), [corners]))
            begin = eight[-1].end()
    return found


def masks(text: str, size: Size, *, labelled: bool = False) -> list[Region]:
    """Returns the outlines of each mask. ``labelled``: only those with a text before them, which is the label."""
    found = []
    for label, run in _phrases(_cleaned(text), _MARK, labelled):
        marks = [mark[0] if mark[1] is None else _number(mark[1]) for mark in run]
        # transformers takes off the first location of a phrase without a text before it looks for the text.
        rest = marks[1:] if not label and isinstance(marks[0], int) else marks
        end = next((at for at, mark in enumerate(rest) if isinstance(mark, int) or mark == _BEGIN), None)
        if end is None or "\n" in label.lstrip():
            continue
        name = (label + "".join(map(str, rest[:end]))).strip()
        for mask in _masks(marks):
            outlines = [_pixels(outline, size) for outline in _outlines(mask)]
            if any(outlines):
                found.append(_outlined(name, [outline for outline in outlines if outline]))
    return found


def boxes_or_masks(text: str, size: Size) -> list[Region]:
    """Returns the masks of a text that has some, else the boxes, each with the text before it."""
    return masks(text, size, labelled=True) if _BEGIN in text else boxes(text, size)


def _phrases(text: str, pattern: re.Pattern[str], labelled: bool) -> Iterator[tuple[str, list[re.Match[str]]]]:
    """Yields each run of four marks or more without anything between, and the text before it.

    The text reaches back to the phrase before, but not over a ``<``. Where there is no text, transformers takes the
    first mark for it, without its ``<``. ``labelled`` false: the texts are empty.
    """
    done, run = 0, list[re.Match[str]]()
    for mark in chain(pattern.finditer(text), (None,)):
        if mark is not None and (not run or mark.start() == run[-1].end()):
            run.append(mark)
            continue
        label = ""
        if labelled and run:
            start = run[0].start()
            label = text[max(text.rfind("<", done, start) + 1, done) : start] or run.pop(0)[0][1:]
        if len(run) >= _LEAST:
            done = run[-1].end()
            yield label, run
        run = [] if mark is None else [mark]


def _masks(marks: Sequence[int | str]) -> list[Sequence[int | str]]:
    """Returns the marks of each mask: those between ``<poly>`` and ``</poly>``, or all if there are no such
    marks."""
    if _BEGIN not in marks or _END not in marks:
        return [marks]
    found, begin = list[Sequence[int | str]](), None
    for at, mark in enumerate(marks):
        if mark == _BEGIN and begin is None:
            begin = at + 1
        elif mark == _END and begin is not None:
            found.append(marks[begin:at])
            begin = None
    return found


def _outlines(mask: Sequence[int | str]) -> Iterator[list[int]]:
    """Yields the numbers of each outline, which a ``<sep>`` or the end of the mask ends, without an odd last."""
    outline = list[int]()
    for mark in (*mask, _SEPARATOR):
        if isinstance(mark, int):
            outline.append(mark)
            continue
        if mark == _SEPARATOR and outline:
            yield outline[: len(outline) // 2 * 2]
        outline = []


def _outlined(label: str, outlines: list[tuple[int, ...]]) -> Region:
    points = tuple(chain.from_iterable(outlines))
    x, y = points[::2], points[1::2]
    return Region(label, (min(x), min(y), max(x), max(y)), tuple(outlines))


def _pixels(numbers: Sequence[int], size: Size) -> tuple[int, ...]:
    """Returns the middles of bins in pixels. ``numbers``: of x and y in turn. Rounds as torch does in float32."""
    steps = [_float32(side / _BINS) for side in size]
    return tuple(int(_float32((number + 0.5) * steps[at % 2])) for at, number in enumerate(numbers))


def _area(corners: Sequence[int]) -> float:
    """Returns the area by which transformers leaves out lines of text: the shoelace formula, without the last
    side."""
    x, y = corners[::2], corners[1::2]
    return 0.5 * abs(sum(x[at] * y[at + 1] - x[at + 1] * y[at] for at in range(_CORNERS - 1)))


def _number(digits: str) -> int:
    return min(int(digits), _FURTHEST) if len(digits) < 100 else _FURTHEST


def _float32(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def _cleaned(text: str) -> str:
    for each in _NOT_READ:
        text = text.replace(each, "")
    return text
