"""Tracks a request on the device: the slots it needs, its tokens, and why they end. No torch."""

from collections.abc import Container, Sequence
from dataclasses import field

from snapcap.models.dataclass import dataclass
from snapcap.service.engine.request import CaptionRequest, FinishReason


@dataclass(eq=False)
class RunningRequest:
    """A request in its slot, or, if it is a beam search, in as many as it has beams."""

    request: CaptionRequest
    limit: int
    submitted: float
    admitted: float
    encode_s: float = 0.0
    prefilled: int = 0  # of the start token and the prompt, read with the image
    prompt_left: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    steps: int = 0  # decode steps launched for it
    left: bool = False  # its slots are others'
    forced_end: bool = False  # its last token at most is an end
    # What its parameters say, here because every step asks for every row.
    slots: int = field(init=False)
    samples: bool = field(init=False)
    searches: bool = field(init=False)
    penalised: bool = field(init=False)  # its scores are changed
    total: int = field(init=False)  # steps until its last token at most

    def __post_init__(self) -> None:
        params = self.request.params
        self.slots = params.num_beams
        self.samples = params.samples
        self.searches = params.searches
        self.penalised = params.penalised
        if self.forced_end and not self.searches:
            # The end that beams are given is no text, so a lone row stops before it.
            self.limit = max(1, self.limit - 1)
        self.total = self.prompt_left + self.limit

    def found(self, generated: Sequence[int], eos_ids: Container[int]) -> None:
        """A beam search has its tokens all at once."""
        ended = bool(generated) and generated[-1] in eos_ids
        self.tokens = list(generated[:-1] if ended else generated)
        cut_off = self.forced_end and len(generated) >= self.limit
        self.finish_reason = "stop" if ended and not cut_off else "length"
