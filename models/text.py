"""Defines what a model's text is made of: special tokens and lengths, tasks, a chat template, rotary positions."""

from typing import Literal, NamedTuple

from snapcap.models.dataclass import dataclass

DEFAULT_NEW_TOKENS = 20  # transformers 5's, where a checkpoint names no length
EarlyStopping = bool | Literal["never"]


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


class TokenBias(NamedTuple):
    """A number that is added to a token's score, where it is the last of ``ids`` and the others are before it."""

    ids: tuple[int, ...]
    bias: float


@dataclass(frozen=True)
class GenerationConfig:
    """Special token ids, and the default length: ``max_length`` counts the start token, as in transformers.

    The other fields are a model's defaults of the options of these names, what it forces, and what else it says of
    its tokens:

    counts_prompt: ``max_length`` counts the prompt too.
    image_id: the placeholder of an image's tokens, where they stand in the text before a row's own.
    forced_bos_id: the first token of every caption that continues no prompt.
    forced_eos_id: a caption that is as long as it may be has this as its last token.
    suppressed, suppressed_first: tokens that no caption has, or none as its first.
    end_growth: after so many tokens, by what factor ends become likelier with each.
    renormalises: a beam adds up log-probabilities among the tokens that are left.
    not_done: settings of the checkpoint that would change captions and are not done, as ``field = value``.
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
        """The checkpoint changes scores, whatever a request says."""
        return bool(self.suppressed or self.suppressed_first or self.biases or self.end_growth)


class Task(NamedTuple):
    """What a model was trained to do when it reads ``text`` beside an image, by its name in requests."""

    name: str
    text: str

    @staticmethod
    def named(name: str) -> str:
        """The name as ours: Florence-2's ``<CAPTION>`` is ``caption``."""
        return name.removeprefix("<").removesuffix(">").lower()
