"""Imports what captions on a thread, while the event loop answers probes already."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class LateImports(Generic[T]):
    """`load` imports, on the thread; `begin` is given its result, on the event loop; `failed` is told what either
    raised, or that `load` has not ended in `timeout` seconds (0: it may take any
    time). The watchdog of what follows counts anew."""

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
        """On the event loop."""
        loop = asyncio.get_running_loop()
        if self._timeout:
            self._limit = loop.call_later(self._timeout, self._stalled)
        threading.Thread(target=self._run, args=(loop,), name="imports", daemon=True).start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loaded = self._load()
        except BaseException as error:  # also what a compiled module raises as it is loaded
            self._failed(error)
            return
        with suppress(RuntimeError):  # the event loop is over: a signal came first
            loop.call_soon_threadsafe(self._loaded, loaded)

    def _loaded(self, loaded: T) -> None:
        if self._limit is not None:
            self._limit.cancel()
        try:
            self._begin(loaded)
        except Exception as error:
            self._failed(error)

    def _stalled(self) -> None:
        from snapcap.service.watch.watchdog import StalledError  # noqa: PLC0415 - once they have

        sentence = f"the imports of the start have not ended after {self._timeout:g} s (--start-timeout)"
        self._failed(StalledError(sentence))
