"""Defines what a model's text is made of: tasks, the parts of a chat template, the rotary positions of tokens."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Frequencies of rotary positions (Su et al., 2021), as transformers computes them.

    scaling: those of Llama 3's longer contexts: factor, low and high frequency factor, and the context's length
        before; or a factor alone, by which all positions are divided.
    """

    theta: float
    scaling: tuple[float, ...] = ()


@dataclass(frozen=True)
class ImageMarkup:
    """How a chat template's text holds an image: its placeholder stands for ``before``, the image's tokens and
    ``after``, of which both are text. ``placeholder``: a text, or the id of the token whose text it is."""

    placeholder: str | int
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class ChatIds:
    """What a chat template makes of a message of one image and a text, as token ids.

    A row's own tokens are ``opening_ids``, those of ``lead``, the message's text and ``trail``, which are text and
    tokenized together, and ``closing_ids``; the reply follows.

    prefix: the ids before the image's tokens, which are the same for every row.
    start_id: the first of a row's own, which is always the same.
    strips: space around the message's text is taken away.
    """

    prefix: tuple[int, ...]
    start_id: int
    opening_ids: tuple[int, ...]
    lead: str
    trail: str
    closing_ids: tuple[int, ...]
    strips: bool = False


class Task(NamedTuple):
    """What a model was trained to do when it reads ``text`` beside an image, by its name in requests."""

    name: str
    text: str

    @staticmethod
    def named(name: str) -> str:
        """The name as ours: Florence-2's ``<CAPTION>`` is ``caption``."""
        return name.removeprefix("<").removesuffix(">").lower()
