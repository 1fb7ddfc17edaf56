"""Captions the bytes of an image for the routes: admission, decoding, the engine, and the text.

This module imports no torch, and it imports numpy only when the first caption is submitted.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from snapcap.models.dataclass import dataclass
from snapcap.models.text import Dialogue
from snapcap.service.captioning.model_defaults import Answer, ModelDefaults, Resolved, regions_member
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.captioning.stream import CaptionStream, LoopHandoff, until
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.config.settings import QueueSettings
from snapcap.service.engine.admission import Admission, Permit
from snapcap.service.errors import InvalidOption, ModelNotFound, NotReady, PromptTooLong, UnprocessableImage
from snapcap.service.images.decode import DecodedImage, EncodedImage, ImageDecoder
from snapcap.service.memory import BodyAccount
from snapcap.service.readiness import Readiness, State
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
    from snapcap.models.text import PromptIds, Region
    from snapcap.service.captioning.prompts import PromptReader
    from snapcap.service.engine.request import CaptionEngine, Completion

# Greatest number of ids of a task's text that the process for prompts returns. An encoder reads fewer.
_MOST_TEXT_IDS = 1 << 15


class CaptionJob(NamedTuple):
    """Holds what captioning an image needs besides the image and its options. `permit` holds the image's place in
    the queue, and `account` counts the image's bytes. `times` is filled in while the request runs."""

    request_id: str
    permit: Permit
    times: CaptionTimes
    account: BodyAccount | None = None


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
    name: str
    created: float
    defaults: ModelDefaults
    prompts: "PromptReader | None"


class ModelFacts(NamedTuple):
    """Holds facts of a model that stay known while it is absent.

    family: the model's `model_type`, as transformers has it.
    tasks: names of the model's tasks, the default first.
    settings_not_done: checkpoint settings that would change captions and that this server ignores.
    takes_instructions: the model reads a prompt as an instruction. Otherwise a prompt is the beginning of the
        caption.
    takes_conversations: the model reads the other messages of a conversation too.
    """

    family: str | None = None
    tasks: tuple[str, ...] = ()
    settings_not_done: tuple[str, ...] = ()
    takes_instructions: bool = False
    takes_conversations: bool = False


class WeightFiles(NamedTuple):
    """Holds the bytes of the files of a model's weights, and a digest of their names, sizes and times of change in
    hex; zeros for a model whose weights are not on this machine."""

    size: int = 0
    digest: str = "0" * 64


class Start(NamedTuple):
    """Holds the records of a model's last start."""

    readiness: Readiness
    timeline: Timeline
    status: StartupStatus


class Keeper(Protocol):
    """Protocol of the object that wakes a model of a server with residency, and ends it."""

    @property
    def state(self) -> str:
        """The model's state: absent, waking, ready or leaving."""

    @property
    def created(self) -> float:
        """The Unix time in seconds since which the server offers the model."""

    @property
    def start(self) -> Start:
        """The records of the model's last start, which are empty before the first."""

    @property
    def leaves_s(self) -> float:
        """Seconds until the model leaves if it gets no further request."""

    def check(self) -> None:
        """Raises ModelNotAwake while requests are refused because the last wake failed."""

    async def wake(self) -> None:
        """Returns once the model is ready. Raises ModelNotAwake."""

    def keep(self, seconds: float) -> None:
        """Sets the idle time after which the model leaves, until it has left."""


class Uses:
    """Counts the requests that use a model, on the event loop. A context manager of one use.

    `count`: number of requests now, of which `waiting` wait until the model is ready. `last`: the moment of
    `time.monotonic` at which the last one ended. `on_idle`: called when there is no request any more."""

    def __init__(self) -> None:
        self.count = 0
        self.waiting = 0
        self.last = time.monotonic()
        self.on_idle: Callable[[], object] = lambda: None

    def begin(self) -> None:
        self.count += 1

    def end(self, _: object = None) -> None:
        self.count -= 1
        self.last = time.monotonic()
        if not self.count:
            self.on_idle()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


LATEST = ":latest"  # Ollama's clients may add this tag to the name of a model


def meant(name: str, known: Collection[str]) -> str:
    """Returns the known name that a client means, or the client's own: letter case, space around a name and
    Ollama's tag `:latest` may differ, unless known names differ in these alone."""
    if name in known:
        return name
    found = [each for each in known if _plain(each) == _plain(name)]
    return found[0] if len(found) == 1 else name


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(LATEST)


class Captioner:
    """Captions images with one model. `attach` may be called from any thread; images are captioned on the event
    loop.

    A server of several models has a captioner for each. Every captioner knows all of them (`join`), and routes have
    the first one: `named` returns the captioner of the model that a request names. With a `Keeper`, the model may
    be absent: a request wakes it, and waits within its time limit.

    `model_name`: None before the first `attach`, if the captioner has no `Keeper`. `models`: the captioners of all
    models by name, the first model first; empty without a `Keeper`. `facts`: None before the first `attach`.
    `files`: the weights on this machine, as far as they are known."""

    def __init__(self, queue: QueueSettings, readiness: Readiness, metrics: Metrics, timeline: Timeline) -> None:
        self._timeout = queue.timeout
        self._readiness = readiness
        self._timeline = timeline
        self._model: _Model | None = None
        self.facts: ModelFacts | None = None
        self.files = WeightFiles()
        self.model_name: str | None = None
        self.keeper: Keeper | None = None
        self.models: Mapping[str, Captioner] = {}
        self._captioned = False
        self.uses = Uses()
        self._metrics = metrics
        self._admission = admission = Admission(queue.size)
        metrics.queue_capacity.set(admission.capacity)
        metrics.queue_depth.set_function(lambda: admission.taken)
        self._handoff_of_loop: LoopHandoff | None = None

    @property
    def known(self) -> ModelFacts:
        """The facts of the model; empty ones before the first `attach`."""
        return self.facts or ModelFacts()

    @property
    def state(self) -> str | None:
        """State of the model that a `Keeper` has: absent, waking, ready or leaving; None without one."""
        return None if self.keeper is None else self.keeper.state

    def join(self, name: str, keeper: Keeper, models: Mapping[str, "Captioner"]) -> None:
        """Gives the model a `Keeper` and a name, and this captioner the captioners of all models by name."""
        self.model_name, self.keeper, self.models = name, keeper, models

    def named(self, name: str | None, permit: Permit | None = None) -> "Captioner":
        """Returns the captioner of a model, for a request without a name this one. `permit` then has its places in
        the queue of that model.

        Raises:
            NotReady: no model is attached, or the server has failed.
            ModelNotFound: there is no such model.
        """
        if not name:
            return self
        name = meant(name, self.models or (self.model_name or "",))
        if name == self.model_name:
            return self
        if name not in self.models:
            raise ModelNotFound(name, *(self.models or (self._servable().name,)))
        if permit is not None:
            permit.move(self.models[name]._admission)
        return self.models[name]

    def attach(
        self,
        engine: "CaptionEngine",
        model_name: str,
        image_decoder: ImageDecoder,
        defaults: ModelDefaults,
        prompts: "PromptReader | None" = None,
    ) -> None:
        """Sets the model; requests are served from now on, until `detach`. Without `prompts`, a prompt is tokenized
        in this process, on the event loop."""
        tokenizer = defaults.tokenizer(None)
        takes = tokenizer.takes_instructions, tokenizer.takes_conversations
        self.facts = ModelFacts(defaults.family, defaults.tasks, defaults.not_done, *takes)
        self.model_name = model_name
        self._model = _Model(engine, image_decoder, model_name, time.time(), defaults, prompts)

    def detach(self) -> Callable[[], None]:
        """Removes the model, which leaves or has failed: later requests wait until it is ready again. Returns a
        function that ends the process that tokenizes its prompts, to call when its requests have ended."""
        model, self._model = self._model, None
        return (lambda: None) if model is None or model.prompts is None else model.prompts.close

    def served(self, name: str | None = None) -> "Captioner":
        """Returns the captioner of a model as `named` does, and raises NotReady too if no model is attached or the
        server has failed."""
        named = self.named(name)
        named._check()
        return named

    @property
    def created(self) -> float:
        """Unix time in seconds since which the model is served. Raises NotReady if no model is attached."""
        return self._servable().created if self.keeper is None else self.keeper.created

    def admit(self) -> Permit:
        """Returns a permit for a request whose image has not arrived, so that a refusal comes before the body is
        read. A request that may name one of several models is refused only if each model would refuse it.

        Raises:
            NotReady: no model is attached, or the server has failed.
            QueueFull: the queue has no free place.
        """
        self._check()
        if all(each._admission.is_full for each in self.models.values()):  # true with a single model
            return self._admission.admit()
        return Permit(self._admission)

    def take(self, permit: Permit) -> None:
        """Takes a place in this model's queue for a permit that has none. Raises QueueFull."""
        permit.move(self._admission)
        permit.take()

    async def awake(self, times: CaptionTimes | None = None) -> None:
        """Waits until the model is ready; a model that is absent wakes. `times`: of the caption that waits.

        Raises:
            ModelNotAwake: the model cannot wake.
            DeadlineExceeded: the model was not ready within the time limit of requests.
        """
        times = times or CaptionTimes()
        with self.uses:
            async with until(times.started + self._timeout):
                await self._awake(times)

    async def caption(self, image: bytes, options: CaptionOptions, job: CaptionJob) -> CaptionResult:
        """Captions one encoded image, and fills in the times of `job` while the request runs. The permit of `job`
        holds the image's place in the queue, and its account counts the image's bytes.

        Cancelling the call withdraws the request from the engine.

        Raises:
            NotReady, ImageMemoryFull, EngineChannelFull, DeadlineExceeded, UnprocessableImage, PromptTooLong,
                InvalidOption, EngineFailed
        """
        encoded = self._encoded(image, options, job)
        with self.uses:
            async with until(encoded.deadline):
                model = await self._awake(job.times)
                resolved = await self._resolve(model, options, encoded)
                decoded = await self._decode(model, encoded, job.times)
                future: Future[Completion] = Future()
                _submit(model, encoded, decoded, resolved, job, future)
                completion = await self._handoff().result(future)
        self._completed()
        answer = model.defaults.answer(resolved, completion.tokens, decoded.size)
        return _result(model, answer, completion, job.times)

    async def stream(
        self,
        image: bytes,
        options: CaptionOptions,
        job: CaptionJob,
        stop: Sequence[str] = (),
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
        encoded, times = self._encoded(image, options, job), job.times
        with self.uses:
            async with until(encoded.deadline):
                model = await self._awake(times)
                resolved = await self._resolve(model, options, encoded, live=live)
                # Before the image is decoded, because the library of the tokenizer may fail on a prompt's tokens.
                words = model.defaults.tokenizer(resolved.task).stream(resolved.prompt_ids)
                text = model.defaults.pieces(resolved, stop)
                decoded = await self._decode(model, encoded, times)
                stream = CaptionStream(
                    words,
                    text,
                    resolved.prompt_ids,
                    encoded.deadline,
                    self._handoff(),
                    times,
                    partial(model.defaults.answer, resolved, size=decoded.size),
                    model,
                    resolved.warning,
                )
                stream.future.add_done_callback(partial(self._ended, stream))
                # A stop sequence ends the generation early, so it needs each token at once. A beam search has no
                # token to give before its end.
                on_token = stream.feed if live or (stop and not resolved.params.searches) else None
                _submit(model, encoded, decoded, resolved, job, stream.future, on_token)
                self.uses.begin()
                stream.future.add_done_callback(self.uses.end)
        return stream

    def result(self, stream: CaptionStream) -> CaptionResult:
        """Returns the whole result of a stream that was read to its end, and that no stop sequence ended. The model
        may have left since then."""
        return _result(stream.model, stream.answer, stream.future.result(), stream.times)

    def close(self) -> None:
        """Ends the process that tokenizes prompts."""
        if self._model is not None and self._model.prompts is not None:
            self._model.prompts.close()

    def _encoded(self, image: bytes, options: CaptionOptions, job: CaptionJob) -> EncodedImage:
        """Returns the image with the deadline of its request. Raises NotReady as `_check` does."""
        self._check()
        seconds = min(options.timeout or self._timeout, self._timeout)
        return EncodedImage(image, job.request_id, job.times.started + seconds, job.account)

    async def _resolve(
        self, model: _Model, options: CaptionOptions, encoded: EncodedImage, *, live: bool = False
    ) -> Resolved:
        """Resolves the options of a request, after the process that tokenizes prompts has read its texts."""
        limits = model.engine.limits

        async def read(text: str, most: int, around: Dialogue = Dialogue()) -> "PromptIds | None":  # noqa: B008 - frozen
            if model.prompts is None or not (text or around):
                return None
            reading = model.prompts.read(
                text, most, encoded.request_id, encoded.deadline, around, limits.most_ahead
            )
            return await self._handoff().result(reading)

        text = model.defaults.text(options)
        ids = await read(options.prompt, limits.max_prompt_tokens, options.around)
        try:
            text_ids = await read(text, _MOST_TEXT_IDS)
        except PromptTooLong:
            raise InvalidOption("task_text", "have fewer tokens") from None
        except InvalidOption as error:
            raise InvalidOption("task_text", error.must) from None
        return model.defaults.resolve(options, limits, live=live, read=ids, text_read=text_ids and text_ids.ids)

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

    def _handoff(self) -> LoopHandoff:
        """Returns the handoff of the running event loop, making it on first use."""
        loop = asyncio.get_running_loop()
        if self._handoff_of_loop is None or self._handoff_of_loop.loop is not loop:
            self._handoff_of_loop = LoopHandoff(loop)
        return self._handoff_of_loop

    def _completed(self) -> None:
        self._admission.completed()
        if not self._captioned:
            self._timeline.mark("first_caption")
            self._captioned = True

    def _ended(self, stream: CaptionStream, future: "Future[Completion]") -> None:
        """Counts the caption of a stream whose request has ended. A stop sequence cancels the request, and the
        caption is complete."""
        if not future.cancelled() and future.exception() is None:
            stream.times.completed(future.result())
            self._completed()
        elif future.cancelled() and stream.finish_reason is not None:
            self._completed()

    async def _awake(self, times: CaptionTimes) -> _Model:
        if self._model is None and self.keeper is not None:
            began = time.monotonic()
            self.uses.waiting += 1
            try:
                await self.keeper.wake()
            finally:
                self.uses.waiting -= 1
                times.wake_s += time.monotonic() - began
        return self._servable()

    def _check(self) -> None:
        """Raises NotReady if no model is attached that a request could wake, or if the server has failed."""
        if self.keeper is None or self._readiness.state is State.FAILED:
            self._servable()

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
    job: CaptionJob,
    future: "Future[Completion]",
    on_token: Callable[[int], None] | None = None,
) -> None:
    """Passes a request to the engine. The result arrives in `future`, each token before it in `on_token`."""
    # The import is here because it imports numpy, which would delay the first second of the process.
    from snapcap.service.engine.request import CaptionRequest  # noqa: PLC0415

    def admitted() -> None:
        job.times.admitted = time.monotonic()
        job.permit.admitted()

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
        resolved.ahead,
    )
    try:
        model.engine.submit(request)
    except BaseException:
        decoded.discard()
        raise
