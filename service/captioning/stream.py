"""Waits on the event loop for other threads: for a result, with a deadline, or for the pieces of a stream."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from snapcap.models.dataclass import dataclass
from snapcap.service.captioning.caption_text import CaptionText
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.errors import DeadlineExceeded

if TYPE_CHECKING:
    from snapcap.models.processing.tokenizer import ByteLevelStream, WordStream
    from snapcap.service.captioning.model_defaults import Answer
    from snapcap.service.engine.request import Completion

T = TypeVar("T")


@asynccontextmanager
async def until(deadline: float) -> AsyncIterator[None]:
    """Cancels what it encloses at `deadline`, a moment of `time.monotonic`. Raises DeadlineExceeded then."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(loop.time() + deadline - time.monotonic()):
            yield
    except TimeoutError:
        raise DeadlineExceeded from None


class LoopHandoff:
    """Hands calls and results to one event loop. The loop is woken once for all calls that arrive before it runs:
    one decode step may end many captions, and each wake-up costs a system call and the interpreter lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function on the event loop, from any thread."""
        self._calls.append(function)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed because the process ends
                self.loop.call_soon_threadsafe(self._take)

    async def result(self, future: "Future[T]") -> T:
        """Waits for another thread's future and returns its result, or raises its error. Cancelling this call
        cancels the future."""
        waiter: asyncio.Future[None] = self.loop.create_future()
        future.add_done_callback(lambda _: self.call(partial(_wake, waiter)))
        try:
            await waiter
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def _take(self) -> None:
        self._woken = False  # reset first, so that calls added during the loop below wake the event loop again
        while self._calls:
            self._calls.popleft()()


@dataclass(eq=False)
class CaptionStream:
    """Streams the text of one caption on the event loop of `handoff`: an async iterator of pieces.

    `words` returns the text of one more token, and at the end the text that was held back; `text` is what stays of
    it. `deadline` is a moment of `time.monotonic`. The code that submits the request sets the moments of `times`.
    `read` returns the answer that tokens are. `model`: the captioner's model, which it needs for the whole result.
    `warning`: a sentence for the user.
    """

    words: "ByteLevelStream | WordStream"
    text: CaptionText
    prompt_ids: Sequence[int]
    deadline: float
    handoff: LoopHandoff
    times: CaptionTimes
    read: "Callable[[Sequence[int]], Answer]"
    model: Any = None
    warning: str = ""

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.future: Future[Completion] = Future()
        self._arrived: asyncio.Queue[int | None] = asyncio.Queue()
        self.future.add_done_callback(lambda _: self.feed(None))

    def feed(self, token: int | None) -> None:
        """Adds one more token, from any thread; None: `future` is done. Tokens that were not fed are taken from its
        result."""
        self.handoff.call(partial(self._arrived.put_nowait, token))

    def spent(self) -> tuple[str, dict[str, float]] | None:
        """Returns the backend that generated the tokens and the timings in milliseconds.

        Returns None before the end, and if a stop sequence ended the generation, because the engine then reports
        no times.
        """
        if not self.future.done() or self.future.cancelled() or self.future.exception() is not None:
            return None
        completion = self.future.result()
        # The submitter's callback sets the same times, perhaps later.
        self.times.completed(completion)
        return completion.backend, self.times.milliseconds(time.monotonic())

    @property
    def answer(self) -> "Answer":
        """The answer that the tokens so far are."""
        return self.read(self.tokens)

    def __aiter__(self) -> "CaptionStream":
        return self

    async def __anext__(self) -> str:
        """Returns the next piece of text, which is never empty. At the end `finish_reason` is set.

        Raises:
            StopAsyncIteration: the text is complete.
            DeadlineExceeded, EngineFailed
        """
        while self.finish_reason is None:
            try:
                async with until(self.deadline):
                    token = await self._arrived.get()
            except DeadlineExceeded:
                self.close()
                raise
            if piece := self._take(token):
                return piece
        raise StopAsyncIteration

    def close(self) -> None:
        """Withdraws the request from the engine, which frees its slot."""
        self.future.cancel()

    def _take(self, token: int | None) -> str:
        if token is not None:
            return self._take_token(token)
        completion = self.future.result()
        piece = "".join(self._take_token(each) for each in completion.tokens[len(self.tokens) :])
        if self.finish_reason is None:
            piece += self.text.push(self.words.end()) + self.text.end()
            # Word streams hold back the last words, so a stop sequence may come with the end.
            self.finish_reason = "stop" if self.text.stopped else completion.finish_reason
        return piece

    def _take_token(self, token: int) -> str:
        if self.finish_reason is not None:
            return ""
        self.tokens.append(token)
        self.times.tokens = len(self.tokens)  # the engine reports no number if the stream ends before the caption
        piece = self.text.push(self.words.push(token))
        if self.text.stopped:
            self.finish_reason = "stop"
            self.close()
        return piece


async def begun(opening: Awaitable[CaptionStream]) -> tuple[CaptionStream, str | None]:
    """Returns a stream and its first piece, or None in place of the piece if the text is empty. An error before the
    first piece is raised here, so that a streamed reply can still have the status of the error."""
    stream = await opening
    try:
        return stream, await anext(stream, None)
    except BaseException:
        stream.close()
        raise


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
