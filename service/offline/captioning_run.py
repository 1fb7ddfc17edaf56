"""Captions every image of a list and writes the captions. The run ends with the list, the engine, or a signal."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import field
from types import FrameType

from snapcap.models.dataclass import dataclass
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.offline.failure import Failure, OutputError, reason_of
from snapcap.service.offline.feed import Asked, Feed, FeedResult
from snapcap.service.offline.model import Model
from snapcap.service.offline.outputs import Outputs
from snapcap.service.offline.progress import Progress


@dataclass
class Tally:
    """Holds the counts of a run. ``signal`` or ``error`` is set if the run ended early, and says why."""

    captions: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    signal: int | None = None
    error: str = ""


def images_ahead(largest_bucket: int, threads: int) -> int:
    """Returns the maximum number of decoded images in memory: one running batch, two waiting batches, and one image
    for each decode thread. The second waiting batch keeps the device busy while an image takes long to decode."""
    return 3 * largest_bucket + threads


def caption_images(
    model: Model,
    images: Sequence[str],
    options: CaptionOptions,
    outputs: Outputs,
    progress: Progress,
    threads: int,
) -> Tally:
    """Captions ``images`` and writes the captions in the order of the images; ``threads`` decode images ahead.

    Raises:
        PromptTooLong, InvalidOption, UnsupportedOption: the model does not support the options. No caption was
            written.
    """
    tokenizer, transform = model.checkpoint.tokenizer, model.checkpoint.transform
    asked = model.defaults.resolve(options, model.engine.limits)
    feed = Feed(
        model.engine,
        lambda data: transform.decode(data).pixels,
        Asked(asked, options.timeout),
        threads,
        images_ahead(model.largest, threads),
    )
    tally = Tally()

    def write(outcome: FeedResult) -> str:
        """Writes the caption of one image. Returns "", or the reason why there is no caption."""
        if outcome.completion is None:
            return outcome.reason
        try:
            outputs.write(outcome.path, tokenizer.caption(asked.prompt_ids, outcome.completion.tokens))
        except OSError as error:
            return f"its caption cannot be written: {reason_of(error)}"
        return ""

    began = time.monotonic()
    try:
        outputs.begin()
        with _ended_by_signals(feed.stop, tally), closing(feed.outcomes(images)) as outcomes:
            for outcome in outcomes:
                reason = write(outcome)
                if reason:
                    tally.failures.append(Failure(outcome.path, reason))
                else:
                    tally.captions += 1
                progress.advance(failed=bool(reason))
    except OutputError as error:
        tally.error = str(error)
    tally.seconds = time.monotonic() - began
    return tally


@contextmanager
def _ended_by_signals(stop: Callable[[], None], tally: Tally) -> Iterator[None]:
    """Calls ``stop`` on the first Ctrl-C or SIGTERM, so that the caption being written is completed. A second
    signal raises KeyboardInterrupt."""

    def handle(number: int, _frame: FrameType | None) -> None:
        if tally.signal is not None:
            raise KeyboardInterrupt
        tally.signal = number
        stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
