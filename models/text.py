"""Defines the parts of a model's text: special tokens and lengths, tasks, a chat template, rotary positions."""

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from snapcap.models.dataclass import dataclass

DEFAULT_NEW_TOKENS = 20  # transformers 5's default for checkpoints that name no length
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Frequencies of rotary positions (Su et al., 2021), as transformers computes them.

    scaling: empty; or a factor by which all positions are divided; or factor, low and high frequency factor and
        original context length of Llama 3's scaling.
    """

    theta: float
    scaling: tuple[float, ...] = ()


@dataclass(frozen=True)
class ImageMarkup:
    """The place of an image in a chat template's text.

    The placeholder is replaced by the text ``before``, the image's tokens and the text ``after``. ``placeholder``
    is a text, or the id of the token with this text. ``reads_ahead``: an encode reads texts that stand before the
    image.
    """

    placeholder: str | int
    before: str = ""
    after: str = ""
    reads_ahead: bool = False


SYSTEM, USER, ASSISTANT = ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Dialogue:
    """The messages around the message with the image, as (role, text), in their order.

    lead: the text in the image's message that stands before the image.
    """

    before: tuple[tuple[str, str], ...] = ()
    after: tuple[tuple[str, str], ...] = ()
    lead: str = ""

    def __bool__(self) -> bool:
        return bool(self.before or self.after or self.lead)

    @property
    def asks(self) -> bool:
        """True if a user says something in one of the texts."""
        return any(role == USER and text.strip() for role, text in (*self.before, *self.after, (USER, self.lead)))


class PromptIds(NamedTuple):
    """The token ids of a prompt.

    ahead: how many of them, the first, stand before the image.
    moved: number of tokens that would stand before the image, had its message's text not been moved behind it. 0 if
        all texts have their places.
    """

    ids: tuple[int, ...]
    ahead: int = 0
    moved: int = 0


@dataclass(frozen=True)
class Frame:
    """The token ids that a chat template puts around the text of a message.

    The text is tokenized together with the texts ``lead`` before it and ``trail`` behind it.
    """

    opening_ids: tuple[int, ...]
    lead: str
    trail: str
    closing_ids: tuple[int, ...]


@dataclass(frozen=True)
class ChatIds:
    """The token ids that a chat template puts around a message of one image and a text.

    A row's own tokens are ``opening_ids``, the tokens of the message, and ``closing_ids``. The reply follows. The
    message's text is tokenized together with the texts ``lead`` before it and ``trail`` behind it.

    prefix: the ids before the image's tokens, which are the same for every row. With ``frames``, the ids that the
        user's frame puts before the message are a row's own, and not in the prefix.
    start_id: the first of a row's own ids behind the image, which is the same for every row.
    strips: white space around the message's text is removed.
    image_first: the template puts the image before all texts of its message.
    frames: the ids around the text of a message of each role in ``ROLES``. Empty if the model reads no texts before
        the image, or the template renders a conversation in another way than message by message.
    reply_ids: the ids behind the conversation's last message. They begin the reply, and end ``closing_ids``.
    """

    prefix: tuple[int, ...]
    start_id: int
    opening_ids: tuple[int, ...]
    lead: str
    trail: str
    closing_ids: tuple[int, ...]
    strips: bool = False
    image_first: bool = False
    frames: tuple[Frame, ...] = ()
    reply_ids: tuple[int, ...] = ()


class TokenBias(NamedTuple):
    """A number that is added to the score of the last of ``ids`` if the other ids stand before it."""

    ids: tuple[int, ...]
    bias: float


@dataclass(frozen=True)
class GenerationConfig:
    """Special token ids, lengths and defaults of generation.

    The fields that are not listed here are a model's defaults of the options with the same names.

    max_length: the default length, which counts the start token, as in transformers.
    counts_prompt: ``max_length`` counts the prompt too.
    image_id: the placeholder of an image's tokens in the text before a row's own tokens.
    forced_bos_id: the first token of every caption that continues no prompt.
    forced_eos_id: the last token of a caption of the greatest length.
    suppressed: tokens that no caption contains.
    suppressed_first: tokens with which no caption begins.
    end_growth: ``(tokens, factor)``: ends become likelier by the factor with each token after so many tokens.
    renormalises: beams add up log-probabilities that are normalised again over the tokens that are left.
    not_done: settings of the checkpoint that are not supported and would change captions, as ``field = value``.
    """

    start_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    max_length: int
    counts_prompt: bool = False
    image_id: int | None = None
    forced_bos_id: int | None = None
    forced_eos_id: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    min_length: int = 0
    min_new_tokens: int | None = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    biases: tuple[TokenBias, ...] = ()
    end_growth: tuple[int, float] | None = None
    renormalises: bool = False
    not_done: tuple[str, ...] = ()

    @property
    def biased(self) -> bool:
        """True if the checkpoint changes scores, whatever a request says."""
        return bool(self.suppressed or self.suppressed_first or self.biases or self.end_growth)


class Region(NamedTuple):
    """A part of a picture that an answer names, in pixels of the upright picture.

    box: left, top, right and bottom.
    polygons: outlines of the part, as x and y of each corner in turn. Empty if the part is the box.
    """

    label: str
    box: tuple[int, int, int, int]
    polygons: tuple[tuple[int, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the region as JSON values, without ``polygons`` if there are none."""
        shape = {"label": self.label, "box": [*self.box]}
        return {**shape, "polygons": [[*outline] for outline in self.polygons]} if self.polygons else shape


# Returns the regions that an answer names. The arguments are the answer's text with its special tokens, and the
# (width, height) of the upright picture in pixels.
ReadRegions = Callable[[str, tuple[int, int]], list[Region]]
INPUT = "{input}"  # the place of a request's text in a task's text


class Task(NamedTuple):
    """A task that a model was trained for. Requests give its ``name``. The model reads ``text`` beside the image.

    keeps_marks: special tokens are a part of the answer, except those of start, end and padding.
    regions: reads the regions that the answer names. None for an answer that names none.
    """

    name: str
    text: str
    keeps_marks: bool = False
    regions: ReadRegions | None = None

    @property
    def takes_text(self) -> bool:
        """True if a request gives a part of the text."""
        return INPUT in self.text

    @staticmethod
    def find(name: str, tasks: Iterable["Task"]) -> "Task | None":
        """Returns the task of this name, or None if there is none. Where a model reads any text, a name in <> that
        is none of the ``tasks`` is itself the text, as ``<GENERATE_TAGS>`` of a fine-tuned checkpoint."""
        known = {task.name: task for task in tasks}
        takes_any = any(task.text == INPUT for task in known.values())
        own = Task(name, name + INPUT, True) if takes_any and re.fullmatch(r"<\w+>", name) else None
        return known.get(Task.named(name), own)

    @staticmethod
    def named(name: str) -> str:
        """Returns a task's name in snapcap: Florence-2's ``<CAPTION>`` is ``caption``."""
        return name.removeprefix("<").removesuffix(">").lower()
