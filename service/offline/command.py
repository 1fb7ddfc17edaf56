"""Runs `snapcap caption`: finds the images, captions them, and reports the images without a caption.

Exit status 0: every image has a caption. 1: an image has no caption, or captions cannot be written. 2: the command
line is wrong, or captions exist that the run would replace. 3: the model did not start. 4: the engine was lost. 130
or 143: Ctrl-C or SIGTERM ended the run. Captions written so far are kept.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import field
from types import FrameType

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image import lift_pillows_limit
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.config.settings import Settings
from snapcap.service.errors import ServiceError
from snapcap.service.images.decode import decode_threads
from snapcap.service.offline.arguments import Job
from snapcap.service.offline.discovery import Failure, OutputError, find_images, reason_of
from snapcap.service.offline.feed import Asked, Feed, FeedResult, Model, OfflineModel, images_ahead
from snapcap.service.offline.outputs import Outputs, sidecar
from snapcap.service.offline.progress import Progress, open_progress
from snapcap.service.readiness import ExitStatus
from snapcap.service.telemetry import logs
from snapcap.warmup.errors import one_line

_MOST_NAMED = 5  # names of skipped files that the report shows; a folder may have a million
_logger = logging.getLogger("snapcap.caption")


@dataclass
class Tally:
    """Holds the counts of a run. ``signal`` or ``error`` is set if the run ended early, and says why; ``status`` is
    the exit status of that error."""

    captions: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    signal: int | None = None
    error: str = ""
    status: ExitStatus = ExitStatus.FAILED


def caption(settings: Settings, job: Job) -> int:
    """Runs the job and returns the exit status. A device thread may still run, so the caller must end the process
    with `service.server.serve.leave`. Raises SettingsError, and ServiceError if the model does not support an
    option. In both cases no caption has been written."""
    logs.configure(settings.log.format, settings.log.level)
    lift_pillows_limit()
    found = find_images(job.images, job.recursive, sys.stdin.buffer if sys.stdin else ())
    with closing(Outputs(job, found)) as outputs:
        # A run whose captions all exist loads no model.
        tally = _run(settings, job, outputs) if outputs.todo else Tally()
        try:
            if not outputs.todo:
                outputs.begin()
            outputs.finish()
        except OutputError as error:
            tally.error = tally.error or str(error)
        tally.failures[:0] = found.failures
        files = {os.path.abspath(path) for path in (job.output, f"{job.output}.jsonl")} if job.output else ()
        own = set(map(sidecar, found.images))
        others = [each for each in found.others if each not in own and os.path.abspath(each) not in files]
        _report(tally, len(outputs.todo), outputs.held, others, as_json=settings.log.format == "json")
    if tally.signal is not None:
        return 128 + tally.signal
    if tally.error:
        return tally.status
    return ExitStatus.FAILED if tally.failures else 0


def _run(settings: Settings, job: Job, outputs: Outputs) -> Tally:
    offline = OfflineModel(settings)
    with closing(open_progress(captions_on_terminal=job.prints and sys.stdout.isatty())) as progress:
        try:
            model = offline.start()
        except Exception as error:
            return Tally(error=one_line(error), status=ExitStatus.START_FAILED)
        progress.begin(len(outputs.todo), f"{model.checkpoint.name} on {model.plan.device}, {model.backend}")
        threads = decode_threads(settings.images.decode_threads)
        try:
            tally = caption_images(model, outputs.todo, job.options, outputs, progress, threads)
        except ServiceError:
            offline.close()
            raise
    if not (tally.signal or tally.error) and tally.captions + len(tally.failures) < len(outputs.todo):
        tally.error = one_line(offline.error or RuntimeError("the engine has ended"))
        tally.status = ExitStatus.ENGINE_LOST
    return tally


def caption_images(
    model: Model, images: Sequence[str], options: CaptionOptions, outputs: Outputs, progress: Progress, threads: int
) -> Tally:
    """Captions ``images`` and writes the captions in the order of the images; ``threads`` decode images ahead.
    Raises PromptTooLong, InvalidOption or UnsupportedOption if the model does not support the options. No caption
    was written."""
    asked = model.defaults.resolve(options, model.engine.limits)
    feed = Feed(
        model.engine,
        model.checkpoint.transform.decode,
        Asked(asked, options.timeout),
        threads,
        images_ahead(model, threads),
    )
    tally = Tally()

    def write(outcome: FeedResult) -> str:
        """Writes the outcome of one image. Returns "", or the reason why there is no caption."""
        reason = outcome.reason
        if outcome.completion is not None:
            try:
                outputs.write(outcome.path, model.defaults.answer(asked, outcome.completion.tokens, outcome.size))
            except OSError as error:
                reason = f"its caption cannot be written: {reason_of(error)}"
        if reason:
            outputs.fail(outcome.path, reason)
        return reason

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


def _report(tally: Tally, asked: int, held: int, others: Sequence[str], as_json: bool) -> None:
    """Logs a line of counts if there were several files, then reports each image without a caption."""
    if asked + held > 1 or others:
        fields: dict[str, object] = {"captions": tally.captions, "failed": len(tally.failures)}
        if held:
            fields["there_already"] = held
        if others:
            fields |= {"not_pictures": len(others), "left_out": _in_short(others)}
        if tally.captions:
            fields |= {"s": tally.seconds, "captions_per_s": round(tally.captions / tally.seconds, 1)}
        _logger.info("captioned", extra={"fields": fields})
    for failure in tally.failures:
        if as_json:
            _logger.warning("no caption", extra={"fields": {"file": failure.path, "reason": failure.reason}})
        else:
            # Standard error shows bytes of a file name that are not valid text as escapes.
            print(f"snapcap: {failure.path}: {failure.reason}", file=sys.stderr)
    if tally.error:
        print(f"snapcap: {tally.error}", file=sys.stderr)
    elif tally.signal is not None:
        print(
            "snapcap: interrupted; written captions are kept, and --resume continues a run that writes files",
            file=sys.stderr,
        )


def _in_short(paths: Sequence[str]) -> str:
    """Returns the first paths of a list and the number of the remaining paths, as text."""
    named = ", ".join(paths[:_MOST_NAMED])
    return named if len(paths) <= _MOST_NAMED else f"{named} and {len(paths) - _MOST_NAMED} more"
