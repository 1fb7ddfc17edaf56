"""Defines the input of a slot: a request's prompt and its sampling parameters. Imports no torch."""

from collections.abc import Sequence

from snapcap.models.dataclass import dataclass
from snapcap.models.text import EarlyStopping


@dataclass(frozen=True)
class SamplingParams:
    """Says how a request's tokens are chosen. ``temperature`` 0 is greedy, ``top_k`` 0 keeps all tokens.

    ``max_new_tokens`` None is the model's default; ``seed`` None draws a random seed. ``num_beams`` above 1 is a
    beam search, which takes as many slots; the fields after it are transformers' options of these names.
    ``repetition_penalty`` 1 and ``no_repeat_ngram_size`` 0 change nothing. ``min_length`` counts tokens as
    transformers does, and becomes ``min_new_tokens`` once the prompt is known. ``fewer_beams``: the beams are a
    default, so the search may use fewer while only smaller buckets are warm. ``biased``: the checkpoint's token
    rules apply."""

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    min_length: int = 0
    min_new_tokens: int | None = None
    fewer_beams: bool = False
    biased: bool = False

    @property
    def samples(self) -> bool:
        return self.temperature > 0

    @property
    def searches(self) -> bool:
        return self.num_beams > 1

    @property
    def penalised(self) -> bool:
        """True if a penalty or rule changes the scores before a token is chosen."""
        penalties = self.repetition_penalty != 1 or self.no_repeat_ngram_size > 0
        return penalties or self.biased or bool(self.min_new_tokens)


@dataclass(frozen=True)
class SlotRequest:
    """Holds the input of a request's slot: a prompt, and how its tokens are chosen.

    uniforms: a number in [0, 1) for each position, drawn from the request's seed; may be empty without sampling.
    new_tokens: the most tokens that a beam search generates. Its row is the first of its beams' rows.
    text: tokens that the encoder reads beside the image, for models that take a text there.
    prefilled: number of tokens, of start token and prompt, that the encode reads; the first step takes the next
        token.
    ahead: number of the prompt's first tokens that stand before the image. The encode reads all of them."""

    prompt: Sequence[int] = ()
    params: SamplingParams = SamplingParams()
    uniforms: Sequence[float] = ()
    new_tokens: int = 0
    text: Sequence[int] = ()
    prefilled: int = 0
    ahead: int = 0

    def begun(self, start_id: int) -> tuple[int, ...]:
        """Returns the tokens that the row has before it generates any."""
        return start_id, *self.prompt

    def read(self, start_id: int) -> Sequence[int]:
        """Returns the tokens that the request's encode reads beside the image."""
        return self.text or self.begun(start_id)[: self.prefilled]


@dataclass(frozen=True)
class Needs:
    """Says which token choices a step runs besides the greedy one: each choice that a row of the step needs."""

    sampling: bool = False
    penalties: bool = False
    beams: bool = False


GREEDY = Needs()
