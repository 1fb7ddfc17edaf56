"""From the bytes of an image to its caption: what the routes call. No torch, and nothing heavy until `attach`."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from service.caption_options import CaptionOptions
from service.caption_stream import CaptionStream
from service.caption_text import CaptionText
from service.errors import (
    DeadlineExceeded,
    InvalidOption,
    ModelNotFound,
    NotReady,
    Overloaded,
    UnprocessableImage,
)
from service.metrics import Metrics
from service.readiness import Readiness, State
from warmup.cpus import available_cpus
from warmup.timeline import Timeline

if TYPE_CHECKING:
    from models.preprocess import DecodedImage, ImageTransform
    from models.tokenizer import Tokenizer
    from service.engine import Engine
    from service.request import Completion


@dataclass(frozen=True)
class CaptionLimits:
    """`timeout`: seconds of a caption at most. `queue_size`: images that may wait to be decoded.
    `decode_threads`: 0 is one for each CPU."""

    timeout: float
    queue_size: int
    decode_threads: int = 0


@dataclass(frozen=True)
class CaptionResult:
    """The reply. `tokens` counts the generated ones; `timings` are in milliseconds."""

    caption: str
    model: str
    tokens: int
    finish_reason: str
    backend: str
    timings: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class _Model:
    engine: "Engine"
    transform: "ImageTransform"
    tokenizer: "Tokenizer"
    name: str
    created: float


@dataclass(frozen=True)
class _Prepared:
    image: "DecodedImage"
    prompt_ids: tuple[int, ...]
    decode_s: float


class Captioner:
    """Safe to attach from any thread; captions on the event loop."""

    def __init__(self, limits: CaptionLimits, readiness: Readiness, metrics: Metrics, timeline: Timeline) -> None:
        self._limits = limits
        self._readiness = readiness
        self._metrics = metrics
        self._timeline = timeline
        self._model: _Model | None = None
        self._decoding = 0
        self._pool = ThreadPoolExecutor(limits.decode_threads or available_cpus(), thread_name_prefix="decode")

    @property
    def pool(self) -> ThreadPoolExecutor:
        """The threads for work on request data that would hold up the event loop."""
        return self._pool

    @property
    def model_name(self) -> str | None:
        """The name of the model once it is attached."""
        return None if self._model is None else self._model.name

    def attach(
        self, engine: "Engine", transform: "ImageTransform", tokenizer: "Tokenizer", model_name: str
    ) -> None:
        """From now on captions are served. Called once, by the start."""
        self._model = _Model(engine, transform, tokenizer, model_name, time.time())

    def served_model(self, name: str | None = None) -> tuple[str, float]:
        """The name of the model and since when it is served, in seconds of Unix time.

        Raises NotReady, and ModelNotFound when it is not the one of this name."""
        model = self._servable()
        if name not in (None, model.name):
            raise ModelNotFound(str(name), model.name)
        return model.name, model.created

    def check_admission(self) -> None:
        """Refuses before any work is done, such as reading the body. Raises NotReady, Overloaded."""
        self._servable()
        if self._decoding >= self._limits.queue_size:
            raise Overloaded

    async def caption(self, image: bytes, options: CaptionOptions, request_id: str) -> CaptionResult:
        """The caption of one encoded image.

        Cancelling the call withdraws the request from the engine. Raises NotReady, Overloaded,
        DeadlineExceeded, UnprocessableImage, PromptTooLong, InvalidOption, EngineFailed."""
        started = time.monotonic()
        self.check_admission()
        timeout = self._timeout(options)
        try:
            async with asyncio.timeout(timeout):
                result = await self._caption(image, options, request_id, started, started + timeout)
        except TimeoutError:
            raise DeadlineExceeded from None
        self._timeline.mark("first_caption")
        return result

    async def stream(
        self, image: bytes, options: CaptionOptions, request_id: str, stop: Sequence[str] = (), *, live: bool
    ) -> CaptionStream:
        """What follows the prompt in the caption of one encoded image, up to the first of the `stop` sequences.

        The request is queued when this returns. `live`: each token is handed over as it is generated. Close the
        stream when the rest is not wanted. Raises what `caption` raises."""
        started = time.monotonic()
        if live and options.num_beams > 1:
            raise InvalidOption("num_beams", "be 1 for a stream; a beam search has no token before its end")
        self.check_admission()
        timeout = self._timeout(options)
        try:
            async with asyncio.timeout(timeout):
                model, prepared = await self._prepared(image, options)
        except TimeoutError:
            raise DeadlineExceeded from None
        text = model.tokenizer.stream(prepared.prompt_ids)
        shown = CaptionText(stop, keep_leading_space=bool(prepared.prompt_ids))
        stream = CaptionStream(text.push, text.end, shown, len(prepared.prompt_ids), started + timeout)
        stream.future.add_done_callback(self._mark_first)
        # A stop sequence ends the generation at once, so it needs each token at once too. A search has none.
        on_token = stream.feed if live or (stop and options.num_beams == 1) else None
        self._submit(model, prepared, options, request_id, started + timeout, stream.future, on_token)
        return stream

    def close(self) -> None:
        """Ends the decode threads as they become free."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _caption(
        self, image: bytes, options: CaptionOptions, request_id: str, started: float, deadline: float
    ) -> CaptionResult:
        model, prepared = await self._prepared(image, options)
        waited_s = time.monotonic() - started - prepared.decode_s
        future: Future[Completion] = Future()
        self._submit(model, prepared, options, request_id, deadline, future)
        completion = await asyncio.wrap_future(future)
        text = model.tokenizer.decode([*prepared.prompt_ids, *completion.tokens])
        return CaptionResult(
            caption=text,
            model=model.name,
            tokens=len(completion.tokens),
            finish_reason=completion.finish_reason,
            backend=completion.backend,
            timings={
                "queue": _ms(waited_s + completion.queue_s),
                "decode_image": _ms(prepared.decode_s),
                "encode": _ms(completion.encode_s),
                "decode": _ms(completion.decode_s),
                "total": _ms(time.monotonic() - started),
            },
        )

    async def _prepared(self, image: bytes, options: CaptionOptions) -> tuple[_Model, _Prepared]:
        model = self._servable()
        self._decoding += 1
        try:
            prepared = await asyncio.wrap_future(self._pool.submit(self._prepare, model, image, options.prompt))
        finally:
            self._decoding -= 1
        wanted = None if options.clamp else options.max_new_tokens
        model.engine.limits.check(len(prepared.prompt_ids), wanted, options.num_beams)
        return model, prepared

    def _submit(
        self,
        model: _Model,
        prepared: _Prepared,
        options: CaptionOptions,
        request_id: str,
        deadline: float,
        future: "Future[Completion]",
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        # Here, because it imports numpy, which the first second of the process must not wait for.
        from service.request import CaptionRequest, SamplingParams  # noqa: PLC0415

        params = SamplingParams.of(options)
        pixels, prompt_ids = prepared.image.pixels, prepared.prompt_ids
        model.engine.submit(CaptionRequest(request_id, pixels, prompt_ids, params, deadline, future, on_token))

    def _prepare(self, model: _Model, image: bytes, prompt: str) -> _Prepared:
        """In a thread of the pool: decode the image, tokenise the prompt."""
        from models.preprocess import ImageError  # noqa: PLC0415 - PIL and numpy, imported by now

        started = time.monotonic()
        try:
            decoded = model.transform.decode(image)
        except ImageError as error:
            self._metrics.image_decode_failures.labels(error.reason).inc()
            raise UnprocessableImage(_sentence(str(error)), error.reason) from None
        seconds = time.monotonic() - started
        self._metrics.image_decode.labels(decoded.format).observe(seconds)
        prompt_ids = tuple(model.tokenizer.encode(prompt)) if prompt else ()
        return _Prepared(decoded, prompt_ids, seconds)

    def _timeout(self, options: CaptionOptions) -> float:
        return min(options.timeout or self._limits.timeout, self._limits.timeout)

    def _mark_first(self, future: "Future[Completion]") -> None:
        if not future.cancelled() and future.exception() is None:
            self._timeline.mark("first_caption")

    def _servable(self) -> _Model:
        if self._model is None or self._readiness.state is State.FAILED:
            raise NotReady(self._readiness.phase())
        return self._model


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)
