"""Streams a caption from the device thread to the event loop, in pieces of text."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from snapcap.service.captioning.loop_handoff import LoopHandoff
from snapcap.service.captioning.stop_sequences import CaptionText
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.errors import DeadlineExceeded

if TYPE_CHECKING:
    from snapcap.service.engine.request import Completion


class CaptionStream:
    """Streams the text of one caption on the event loop of `handoff`.

    `push` returns the text of one more token, and `end` the text that was held back. `deadline` is a moment of
    `time.monotonic`. The code that submits the request sets the moments of `times`.
    """

    def __init__(
        self,
        push: Callable[[int], str],
        end: Callable[[], str],
        text: CaptionText,
        prompt_tokens: int,
        deadline: float,
        handoff: LoopHandoff,
        times: CaptionTimes,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.future: Future[Completion] = Future()
        self._push = push
        self._end = end
        self._text = text
        self._handoff = handoff
        self._times = times
        self._deadline = handoff.loop.time() + deadline - time.monotonic()
        self._arrived: asyncio.Queue[int | None] = asyncio.Queue()
        self.future.add_done_callback(lambda _: self._hand_over(None))

    def feed(self, token: int) -> None:
        """Adds one more token, from any thread. Tokens that were not fed are taken from the result of `future`."""
        self._hand_over(token)

    def spent(self) -> tuple[str, dict[str, float]] | None:
        """Returns the backend that generated the tokens and the timings in milliseconds.

        Returns None before the end, and if a stop sequence ended the generation, because the engine then reports
        no times.
        """
        if not self.future.done() or self.future.cancelled() or self.future.exception() is not None:
            return None
        completion = self.future.result()
        # The submitter's callback sets the same times, perhaps later.
        self._times.completed(completion)
        return completion.backend, self._times.milliseconds(time.monotonic())

    async def next(self) -> str | None:
        """Returns the next piece of text, which is never empty; None at the end, when `finish_reason` is set.

        Raises:
            DeadlineExceeded, EngineFailed
        """
        while self.finish_reason is None:
            piece = self._take(await self._next_token())
            if piece:
                return piece
        return None

    async def rest(self) -> str:
        """Returns all text that `next` has not returned yet. Raises the errors of `next`."""
        pieces = []
        while (piece := await self.next()) is not None:
            pieces.append(piece)
        return "".join(pieces)

    def close(self) -> None:
        """Withdraws the request from the engine, which frees its slot."""
        self.future.cancel()

    def _hand_over(self, token: int | None) -> None:
        self._handoff.call(partial(self._arrived.put_nowait, token))

    async def _next_token(self) -> int | None:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._arrived.get()
        except TimeoutError:
            self.close()
            raise DeadlineExceeded from None

    def _take(self, token: int | None) -> str:
        if token is not None:
            return self._take_token(token)
        completion = self.future.result()
        piece = "".join(self._take_token(each) for each in completion.tokens[self.completion_tokens :])
        if self.finish_reason is None:
            self.finish_reason = completion.finish_reason
            piece += self._text.push(self._end()) + self._text.end()
        return piece

    def _take_token(self, token: int) -> str:
        if self.finish_reason is not None:
            return ""
        self.completion_tokens += 1
        piece = self._text.push(self._push(token))
        if self._text.stopped:
            self.finish_reason = "stop"
            self.close()
        return piece
