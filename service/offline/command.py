"""Runs `snapcap caption`: finds the images, captions them, and reports the images without a caption.

Exit status 0: every image has a caption. 1: an image has no caption, or the model did not start. 2: the command
line is wrong, or captions exist that the run would replace. 130 or 143: Ctrl-C or SIGTERM ended the run; captions
written so far are kept.
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import closing

from snapcap.service.config.settings import Settings
from snapcap.service.errors import ServiceError
from snapcap.service.images.decode import decode_threads
from snapcap.service.offline.arguments import Job
from snapcap.service.offline.captioning_run import Tally, caption_images
from snapcap.service.offline.discovery import find_images
from snapcap.service.offline.failure import Failure
from snapcap.service.offline.model import OfflineModel
from snapcap.service.offline.outputs import Outputs
from snapcap.service.offline.progress import open_progress
from snapcap.service.offline.sidecars import sidecar
from snapcap.service.telemetry import logs
from snapcap.warmup.errors import one_line

_MOST_NAMED = 5  # names of skipped files that the report shows; a folder may have a million
_logger = logging.getLogger("snapcap.caption")


def caption(settings: Settings, job: Job) -> int:
    """Runs the job and returns the exit status. A device thread may still run, so the caller must end the process
    with `service.server.serve.leave`.

    Raises SettingsError, and ServiceError if the model does not support an option. In both cases no caption has
    been written."""
    logs.configure(settings.log.format, settings.log.level)
    found = find_images(job.images, job.recursive, sys.stdin.buffer if sys.stdin else ())
    with closing(Outputs(job, found)) as outputs:
        # A run whose captions all exist loads no model.
        tally = _run(settings, job, outputs) if outputs.todo else Tally()
        tally.failures[:0] = found.failures
        own = {job.output, *map(sidecar, found.images)}
        others = [each for each in found.others if each not in own]
        _report(tally, len(outputs.todo), outputs.held, others, as_json=settings.log.format == "json")
    if tally.signal is not None:
        return 128 + tally.signal
    return 1 if tally.failures or tally.error else 0


def _run(settings: Settings, job: Job, outputs: Outputs) -> Tally:
    progress = open_progress(captions_on_terminal=job.prints and sys.stdout.isatty())
    offline = OfflineModel(settings)
    try:
        model = offline.start()
        if model is None:
            return Tally(error=one_line(offline.error or RuntimeError("the start failed")))
        progress.begin(len(outputs.todo), f"{model.checkpoint.name} on {model.device}, {model.backend}")
        threads = decode_threads(settings.images.decode_threads)
        tally = caption_images(model, outputs.todo, job.options, outputs, progress, threads)
    except ServiceError:
        offline.close()
        raise
    finally:
        progress.close()
    if not (tally.signal or tally.error) and tally.captions + len(tally.failures) < len(outputs.todo):
        tally.error = one_line(offline.error or RuntimeError("the engine has ended"))
    return tally


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
        _say_failed(failure, as_json)
    if tally.error:
        print(f"snapcap: {tally.error}", file=sys.stderr)
    elif tally.signal is not None:
        print("snapcap: interrupted; what was done is kept, and --resume goes on from files", file=sys.stderr)


def _in_short(paths: Sequence[str]) -> str:
    """Returns the first paths of a list and the number of the remaining paths, as text."""
    named = ", ".join(paths[:_MOST_NAMED])
    return named if len(paths) <= _MOST_NAMED else f"{named} and {len(paths) - _MOST_NAMED} more"


def _say_failed(failure: Failure, as_json: bool) -> None:
    if as_json:
        _logger.warning("no caption", extra={"fields": {"file": failure.path, "reason": failure.reason}})
    else:
        # Standard error shows bytes of a file name that are not valid text as escapes.
        print(f"snapcap: {failure.path}: {failure.reason}", file=sys.stderr)
