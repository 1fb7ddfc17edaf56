"""Captions the bytes of an image for the routes: admission, decoding, the engine, and the text.

This module imports no torch, and it imports numpy only when the first caption is submitted.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass
from snapcap.service.captioning.model_defaults import Answer, ModelDefaults, Resolved, regions_member
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.captioning.stream import CaptionStream, LoopHandoff, until
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.engine.admission import Admission, Permit
from snapcap.service.errors import InvalidOption, ModelNotFound, NotReady, PromptTooLong, UnprocessableImage
from snapcap.service.images.decode import (
    DecodedImage,
    EncodedImage,
    ImageDecoder,
    ThreadImageDecoder,
    decode_threads,
)
from snapcap.service.memory import BodyAccount
from snapcap.service.readiness import Readiness, State
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
    from snapcap.models.processing.tokenizer import Tokenizer
    from snapcap.models.processing.transform import ImageTransform
    from snapcap.models.text import Region
    from snapcap.service.captioning.prompts import PromptReader
    from snapcap.service.engine.request import CaptionEngine, Completion

# Greatest number of ids of a task's text that the process for prompts returns. An encoder reads fewer.
_MOST_TEXT_IDS = 1 << 15


@dataclass(frozen=True)
class CaptionLimits:
    """Limits of captioning. `timeout`: the most seconds that a caption may take. `queue_size`: the most
    requests that may wait. `decode_threads`: number of decode threads; 0 lets `images.decode.decode_threads`
    choose. `image_room`: the most bytes of memory that decoding one image may take on such a thread; None sets
    no limit."""

    timeout: float
    queue_size: int
    decode_threads: int = 0
    image_room: int | None = None


@dataclass(frozen=True)
class CaptionResult:
    """Holds the result of a caption request. `tokens` is the number of generated tokens; `timings` are in
    milliseconds. `regions`: as in `Answer`."""

    caption: str
    model: str
    tokens: int
    finish_reason: str
    backend: str
    timings: Mapping[str, float]
    regions: "Sequence[Region] | None" = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values, without `regions` if there are none to read."""
        values = dict(vars(self))
        return values | regions_member(values.pop("regions"))


@dataclass(frozen=True)
class _Model:
    engine: "CaptionEngine"
    image_decoder: ImageDecoder
    tokenizer: "Tokenizer"
    name: str
    created: float
    defaults: ModelDefaults
    prompts: "PromptReader | None"


class Captioner:
    """Captions images. `attach` may be called from any thread; images are captioned on the event loop."""

    def __init__(self, limits: CaptionLimits, readiness: Readiness, metrics: Metrics, timeline: Timeline) -> None:
        self._limits = limits
        self._readiness = readiness
        self._timeline = timeline
        self._model: _Model | None = None
        self._captioned = False
        self._pool = ThreadPoolExecutor(decode_threads(limits.decode_threads), thread_name_prefix="decode")
        self._metrics = metrics
        self._admission = admission = Admission(limits.queue_size)
        metrics.queue_capacity.set(admission.capacity)
        metrics.queue_depth.set_function(lambda: admission.taken)
        self._handoff_of_loop: LoopHandoff | None = None

    @property
    def pool(self) -> Executor:
        """Threads for work on request data that would block the event loop."""
        return self._pool

    @property
    def model_name(self) -> str | None:
        """Name of the model; None before `attach`."""
        return None if self._model is None else self._model.name

    @property
    def model_family(self) -> str | None:
        """The model's `model_type`, as transformers has it; None before `attach`."""
        return None if self._model is None else self._model.defaults.family

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the model's tasks, the default first; empty before `attach`."""
        return () if self._model is None else self._model.defaults.tasks

    @property
    def settings_not_done(self) -> tuple[str, ...]:
        """Checkpoint settings that would change captions and that this server ignores; empty before `attach`."""
        return () if self._model is None else self._model.defaults.not_done

    @property
    def takes_instructions(self) -> bool:
        """True if the model reads a prompt as an instruction. Otherwise a prompt is the beginning of the
        caption."""
        return self._model is not None and self._model.tokenizer.takes_instructions

    def attach(
        self,
        engine: "CaptionEngine",
        transform: "ImageTransform",
        tokenizer: "Tokenizer",
        model_name: str,
        image_decoder: ImageDecoder | None = None,
        defaults: ModelDefaults | None = None,
        prompts: "PromptReader | None" = None,
    ) -> None:
        """Sets the model; requests are served from now on. Call this once. Without `image_decoder`, `pool` decodes
        images. Without `prompts`, a prompt is tokenized in this process, on the event loop."""
        image_decoder = image_decoder or ThreadImageDecoder(self._pool, transform, self._limits.image_room)
        defaults = defaults or ModelDefaults(tokenizer)
        self._model = _Model(engine, image_decoder, tokenizer, model_name, time.time(), defaults, prompts)

    def served_model(self, name: str | None = None) -> tuple[str, float]:
        """Returns the model's name and the Unix time in seconds since which the model is served.

        Raises:
            NotReady: no model is attached, or the server has failed.
            ModelNotFound: the served model has another name than `name`.
        """
        model = self._servable()
        if name not in (None, model.name):
            raise ModelNotFound(str(name), model.name)
        return model.name, model.created

    def admit(self) -> Permit:
        """Returns a permit for a request whose image has not arrived, so that a refusal comes before the body is
        read.

        Raises:
            NotReady: no model is attached, or the server has failed.
            QueueFull: the queue has no free place.
        """
        self._servable()
        return self._admission.admit()

    async def caption(
        self,
        image: bytes,
        options: CaptionOptions,
        request_id: str,
        permit: Permit,
        account: BodyAccount | None = None,
        times: CaptionTimes | None = None,
    ) -> CaptionResult:
        """Captions one encoded image. `permit` holds the image's place in the queue, and `account` counts the
        image's bytes. Fills in `times` while the request runs.

        Cancelling the call withdraws the request from the engine.

        Raises:
            NotReady, ImageMemoryFull, EngineChannelFull, DeadlineExceeded, UnprocessableImage, PromptTooLong,
                InvalidOption, EngineFailed
        """
        times = times or CaptionTimes()
        model, deadline = self._servable(), times.started + self._timeout(options)
        encoded = EncodedImage(image, request_id, deadline, account)
        async with until(deadline):
            resolved = await self._resolve(model, options, encoded)
            decoded = await self._decode(model, encoded, times)
            future: Future[Completion] = Future()
            _submit(model, encoded, decoded, resolved, permit, times, future)
            completion = await self._handoff().result(future)
        self._completed()
        return _result(model, model.defaults.answer(resolved, completion.tokens, decoded.size), completion, times)

    async def stream(
        self,
        image: bytes,
        options: CaptionOptions,
        request_id: str,
        permit: Permit,
        stop: Sequence[str] = (),
        account: BodyAccount | None = None,
        times: CaptionTimes | None = None,
        *,
        live: bool,
    ) -> CaptionStream:
        """Streams the text that follows the prompt in an image's caption, up to the first of the `stop` sequences.

        Returns when the request is queued. `live` delivers each token when it is generated. A caller that does not
        want the rest closes the stream.

        Raises:
            InvalidOption: a live stream was asked of a beam search.

        Also raises all errors of `caption`.
        """
        if live and options.sampling.searches:
            raise InvalidOption("num_beams", "be 1 for a stream; a beam search has no token before its end")
        times = times or CaptionTimes()
        model, deadline = self._servable(), times.started + self._timeout(options)
        encoded = EncodedImage(image, request_id, deadline, account)
        async with until(deadline):
            resolved = await self._resolve(model, options, encoded, live=live)
            decoded = await self._decode(model, encoded, times)
            read = partial(model.defaults.answer, resolved, size=decoded.size)
            stream = self._new_stream(model, resolved, stop, deadline, times, read)
            # A stop sequence ends the generation early, so it needs each token at once. A beam search has no token
            # to give before its end.
            on_token = stream.feed if live or (stop and not resolved.params.searches) else None
            _submit(model, encoded, decoded, resolved, permit, times, stream.future, on_token)
        return stream

    def result(self, stream: CaptionStream) -> CaptionResult:
        """Returns the whole result of a stream that was read to its end, and that no stop sequence ended. Raises
        NotReady if the server has failed."""
        return _result(self._servable(), stream.answer, stream.future.result(), stream.times)

    def close(self) -> None:
        """Stops the decode threads when their present images are done, and ends the process that tokenizes
        prompts."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._model is not None and self._model.prompts is not None:
            self._model.prompts.close()

    async def _resolve(
        self, model: _Model, options: CaptionOptions, encoded: EncodedImage, *, live: bool = False
    ) -> Resolved:
        """Resolves the options of a request, after the process that tokenizes prompts has read its texts."""
        limits = model.engine.limits

        async def read(text: str, most: int) -> tuple[int, ...] | None:
            if not text or model.prompts is None:
                return None
            reading = model.prompts.read(text, most, encoded.request_id, encoded.deadline)
            return await self._handoff().result(reading)

        text = model.defaults.text(options)
        ids = await read(options.prompt, limits.max_prompt_tokens)
        try:
            text_ids = await read(text, _MOST_TEXT_IDS)
        except PromptTooLong:
            raise InvalidOption("task_text", "have fewer tokens") from None
        except InvalidOption as error:
            raise InvalidOption("task_text", error.must) from None
        return model.defaults.resolve(options, limits, live=live, read=ids, text_read=text_ids)

    async def _decode(self, model: _Model, encoded: EncodedImage, times: CaptionTimes) -> DecodedImage:
        """Decodes the image of a request. The metrics count it, decoded or unreadable."""
        try:
            decoded = await model.image_decoder.decode(encoded)
        except UnprocessableImage as error:
            self._metrics.image_decode_failures.labels(error.reason).inc()
            raise
        self._metrics.image_decoded(decoded.format, decoded.seconds)
        times.image_decoded(decoded)
        return decoded

    def _new_stream(
        self,
        model: _Model,
        resolved: Resolved,
        stop: Sequence[str],
        deadline: float,
        times: CaptionTimes,
        read: Callable[[Sequence[int]], Answer],
    ) -> CaptionStream:
        prompt_ids = resolved.prompt_ids
        text = model.defaults.tokenizer(resolved.task).stream(prompt_ids)
        shown = model.defaults.pieces(resolved, stop)
        stream = CaptionStream(text.push, text.end, shown, prompt_ids, deadline, self._handoff(), times, read)
        stream.future.add_done_callback(partial(self._ended, times))
        return stream

    def _handoff(self) -> LoopHandoff:
        """Returns the handoff of the running event loop, making it on first use."""
        loop = asyncio.get_running_loop()
        if self._handoff_of_loop is None or self._handoff_of_loop.loop is not loop:
            self._handoff_of_loop = LoopHandoff(loop)
        return self._handoff_of_loop

    def _timeout(self, options: CaptionOptions) -> float:
        return min(options.timeout or self._limits.timeout, self._limits.timeout)

    def _completed(self) -> None:
        self._admission.completed()
        if not self._captioned:
            self._timeline.mark("first_caption")
            self._captioned = True

    def _ended(self, times: CaptionTimes, future: "Future[Completion]") -> None:
        if not future.cancelled() and future.exception() is None:
            times.completed(future.result())
            self._completed()

    def _servable(self) -> _Model:
        if self._model is None or self._readiness.state is State.FAILED:
            raise NotReady(self._readiness.phase())
        return self._model


def _result(model: _Model, answer: Answer, completion: "Completion", times: CaptionTimes) -> CaptionResult:
    times.completed(completion)
    return CaptionResult(
        caption=answer.text,
        model=model.name,
        tokens=len(completion.tokens),
        finish_reason=completion.finish_reason,
        backend=completion.backend,
        timings=times.milliseconds(time.monotonic()),
        regions=answer.regions,
    )


def _submit(
    model: _Model,
    encoded: EncodedImage,
    decoded: DecodedImage,
    resolved: Resolved,
    permit: Permit,
    times: CaptionTimes,
    future: "Future[Completion]",
    on_token: Callable[[int], None] | None = None,
) -> None:
    """Passes a request to the engine. The result arrives in `future`, each token before it in `on_token`."""
    # The import is here because it imports numpy, which would delay the first second of the process.
    from snapcap.service.engine.request import CaptionRequest  # noqa: PLC0415

    def admitted() -> None:
        times.admitted = time.monotonic()
        permit.admitted()

    request = CaptionRequest(
        encoded.request_id,
        decoded.pixels,
        resolved.prompt_ids,
        resolved.params,
        encoded.deadline,
        future,
        on_token,
        admitted,
        resolved.text_ids,
    )
    try:
        model.engine.submit(request)
    except BaseException:
        decoded.discard()
        raise
