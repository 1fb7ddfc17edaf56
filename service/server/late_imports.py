"""Imports the modules that caption, on a thread, while the event loop answers probes already."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class LateImports(Generic[T]):
    """Calls `load` on a thread, and then `begin` with its result on the event loop.

    `failed` is called with the exception of either, or with an error if `load` has not ended after `timeout`
    seconds (0 sets no limit). The watchdog of the start that follows begins at 0."""

    def __init__(
        self,
        load: Callable[[], T],
        begin: Callable[[T], None],
        failed: Callable[[BaseException], None],
        timeout: float,
    ) -> None:
        self._load = load
        self._begin = begin
        self._failed = failed
        self._timeout = timeout
        self._limit: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the thread. Called on the event loop."""
        loop = asyncio.get_running_loop()
        if self._timeout:
            self._limit = loop.call_later(self._timeout, self._stalled)
        threading.Thread(target=self._run, args=(loop,), name="imports", daemon=True).start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loaded = self._load()
        except BaseException as error:  # a compiled module may raise anything while it is loaded
            self._failed(error)
            return
        with suppress(RuntimeError):  # the event loop is closed, because a signal came first
            loop.call_soon_threadsafe(self._loaded, loaded)

    def _loaded(self, loaded: T) -> None:
        if self._limit is not None:
            self._limit.cancel()
        try:
            self._begin(loaded)
        except Exception as error:
            self._failed(error)

    def _stalled(self) -> None:
        from snapcap.service.watch import StalledError  # noqa: PLC0415 - needed by failures only

        sentence = f"the imports of the start have not ended after {self._timeout:g} s (--start-timeout)"
        self._failed(StalledError(sentence))
