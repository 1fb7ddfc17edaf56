"""`snapcap caption`: the server's engine without the server."""

import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from models.image import ImageError
from service import logs
from service.caption_options import CaptionOptions
from service.config import Settings
from service.device_thread import DeviceThread
from service.engine import Engine
from service.errors import ServiceError
from service.request import CaptionRequest, Completion, SamplingParams
from service.scheduler import Scheduler
from service.start_options import start_options
from service.startup import explain
from warmup.cpus import available_cpus
from warmup.prepared import Checkpoint
from warmup.startup import Loaded
from warmup.status import StartupStatus
from warmup.timeline import Timeline

# Images decoded ahead of the engine, and requests it holds: bounded, so that a long list needs no memory.
_AHEAD = 256
_NEVER = float("inf")


class _Silent:
    """An observer for a process that nobody scrapes."""

    def queue_waited(self, seconds: float) -> None: ...

    def encoded(self, bucket: int, rows: int, seconds: float) -> None: ...

    def decode_stepped(self, bucket: int, rows: int, seconds: float) -> None: ...

    def tokens_generated(self, count: int) -> None: ...


@dataclass
class _Started:
    """What the device thread reports: the parts that caption, or the error."""

    done: threading.Event = field(default_factory=threading.Event)
    parts: "tuple[Checkpoint, Engine] | None" = None
    error: Exception | None = None


def caption_files(settings: Settings, paths: list[Path], options: CaptionOptions) -> int:
    """Print ``path<TAB>caption`` for every image, in order. Exit status 1 when one of them failed."""
    logs.configure(settings.log.format, settings.log.level)
    started = _Started()

    def ready(loaded: Loaded, engine: Engine, _scheduler: Scheduler) -> None:
        started.parts = (loaded.checkpoint, engine)
        started.done.set()

    def failed(error: Exception) -> None:
        started.error = error
        started.done.set()

    device = DeviceThread(
        start_options(settings), Timeline.since_exec(), StartupStatus(), _Silent(), 2 * _AHEAD, ready, failed
    )
    device.start()
    started.done.wait()
    if started.parts is None:
        print(f"snapcap: {explain(started.error or RuntimeError('the start failed'))}", file=sys.stderr)
        return 1
    checkpoint, engine = started.parts
    threads = settings.images.decode_threads or available_cpus()
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        failures = _caption_all(checkpoint, engine, pool, paths, options)
    engine.stop()
    device.join()
    return 1 if failures else 0


def _caption_all(
    checkpoint: Checkpoint, engine: Engine, pool: ThreadPoolExecutor, paths: list[Path], options: CaptionOptions
) -> int:
    prompt = tuple(checkpoint.tokenizer.encode(options.prompt)) if options.prompt else ()
    engine.limits.check(len(prompt), options.max_new_tokens)
    pending: deque[tuple[Path, Future[Future[Completion]]]] = deque()
    failures = 0
    for path in paths:
        if len(pending) >= _AHEAD:
            failures += _print_first(checkpoint, prompt, pending)
        pending.append((path, pool.submit(_submit, checkpoint, engine, path, prompt, options)))
    while pending:
        failures += _print_first(checkpoint, prompt, pending)
    return failures


def _submit(
    checkpoint: Checkpoint, engine: Engine, path: Path, prompt: tuple[int, ...], options: CaptionOptions
) -> "Future[Completion]":
    """In a thread of the pool: read, decode and hand to the engine."""
    pixels = checkpoint.transform.decode(path.read_bytes()).pixels
    params = SamplingParams(options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.seed)
    deadline = time.monotonic() + options.timeout if options.timeout else _NEVER
    request = CaptionRequest(str(path), pixels, prompt, params, deadline, Future())
    engine.submit(request)
    return request.future


def _print_first(
    checkpoint: Checkpoint,
    prompt: tuple[int, ...],
    pending: "deque[tuple[Path, Future[Future[Completion]]]]",
) -> bool:
    """Wait for the oldest image and print its line. True when it failed."""
    path, submitted = pending.popleft()
    try:
        completion = submitted.result().result()
    except (OSError, ImageError, ServiceError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        print(f"snapcap: {path}: {reason}", file=sys.stderr)
        return True
    print(f"{path}\t{checkpoint.tokenizer.decode([*prompt, *completion.tokens])}")
    return False
