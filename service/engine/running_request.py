"""Tracks a request on the device: the slots it needs, its tokens, and why they end. Imports no torch."""

from collections.abc import Container, Sequence
from dataclasses import field

from snapcap.models.dataclass import dataclass
from snapcap.service.engine.request import CaptionRequest, FinishReason


@dataclass(eq=False)
class RunningRequest:
    """A request that has a slot on the device, or one slot for each beam of a beam search."""

    request: CaptionRequest
    limit: int
    submitted: float
    admitted: float
    encode_s: float = 0.0
    prefilled: int = 0  # tokens, of the start token and the prompt, that were read with the image
    prompt_left: int = 0  # prompt tokens that decode steps have yet to read
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    steps: int = 0  # decode steps launched for the request
    left: bool = False  # the request has ended: its slots may belong to other requests
    forced_end: bool = False  # a caption of the greatest length is ended with an end token
    # The next four follow from the request's parameters. Each step reads them for every row, so they are kept.
    slots: int = field(init=False)
    samples: bool = field(init=False)
    searches: bool = field(init=False)
    penalised: bool = field(init=False)  # penalties change the scores
    total: int = field(init=False)  # greatest number of decode steps until the last token

    def __post_init__(self) -> None:
        params = self.request.params
        self.slots = params.num_beams
        self.samples = params.samples
        self.searches = params.searches
        self.penalised = params.penalised
        if self.forced_end and not self.searches:
            # The forced end token is no text, so a row without beams stops one token earlier and never generates
            # it.
            self.limit = max(1, self.limit - 1)
        self.total = self.prompt_left + self.limit

    def found(self, generated: Sequence[int], eos_ids: Container[int]) -> None:
        """Sets the tokens and the finish reason of a beam search, which has its tokens all at once."""
        ended = bool(generated) and generated[-1] in eos_ids
        self.tokens = list(generated[:-1] if ended else generated)
        cut_off = self.forced_end and len(generated) >= self.limit
        self.finish_reason = "stop" if ended and not cut_off else "length"
