"""Collects requests that wait for a model into batches, for the peers that have no batching of their own."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Runs batches one after the other in a thread."""

    def __init__(self, run: Callable[[Sequence[Item]], Sequence[Answer]], most: int) -> None:
        """``run`` returns as many answers as it gets items. ``most`` is the greatest number of items in a batch."""
        self._run = run
        self._most = most
        self._waiting: SimpleQueue[tuple[Item, Future[Answer]]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, item: Item) -> "Future[Answer]":
        answer: Future[Answer] = Future()
        self._waiting.put((item, answer))
        return answer

    def _work(self) -> None:
        while True:
            batch = self._next_batch()
            try:
                answers = self._run([item for item, _ in batch])
            except Exception as error:  # an error of the requests, which must not end this thread
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)

    def _next_batch(self) -> "list[tuple[Item, Future[Answer]]]":
        batch = [self._waiting.get()]
        while len(batch) < self._most:
            try:
                batch.append(self._waiting.get_nowait())
            except Empty:
                break
        # A request that was cancelled is not run.
        running = [each for each in batch if each[1].set_running_or_notify_cancel()]
        return running or self._next_batch()
