"""A request on the device, as the scheduler and the engine see it. No torch."""

from dataclasses import dataclass, field

from service.request import CaptionRequest, FinishReason


@dataclass(eq=False)
class Running:
    """A request in its slot, or, if it is a beam search, in as many as it has beams."""

    request: CaptionRequest
    limit: int
    submitted: float
    admitted: float
    encode_s: float = 0.0
    prompt_left: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    steps: int = 0  # decode steps launched for it
    left: bool = False  # its slots are others'

    @property
    def slots(self) -> int:
        return self.request.params.num_beams

    @property
    def samples(self) -> bool:
        return self.request.params.temperature > 0

    @property
    def searches(self) -> bool:
        return self.slots > 1

    @property
    def penalised(self) -> bool:
        """Its tokens so far bear on its next."""
        params = self.request.params
        return params.repetition_penalty != 1 or params.no_repeat_ngram_size > 0
