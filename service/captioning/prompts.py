"""Has prompts tokenized in a separate process (`prompt_worker`), one after the other.

    event loop ── prompt ──▶ thread ── a line ──▶ prompt process
         ▲                                              │
         └───────────────────── ids ────────────────────┘

The first prompt starts the process, because most requests have no prompt. A prompt that exceeds the process's
limits ends the process and is refused. The next prompt starts a new process.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapcap.models.json_object import to_json
from snapcap.models.text import Dialogue, PromptIds
from snapcap.service.errors import DeadlineExceeded, EngineFailed, InvalidOption, NotReady, PromptTooLong

if TYPE_CHECKING:
    from snapcap.models.text import ChatIds
    from snapcap.warmup.machine.worker import Worker

START_S = 30.0
# Seconds to wait for the ids of one prompt. The process's CPU limit is shorter, but the process may get no CPU.
MOST_S = 10.0
_IDS = 1 << 31  # more than any vocabulary has
_MODULE = "snapcap.service.captioning.prompt_worker"
_logger = logging.getLogger("snapcap.captioning")


class PromptReader:
    """Tokenizes prompts for one model. Its methods may be called from any thread."""

    def __init__(self, folder: Path, chat: "ChatIds | None") -> None:
        """Prepares to tokenize with the checkpoint in `folder`. `chat`: the special ids of a model that takes
        instructions."""
        self._folder = folder
        self._chat = chat
        self._worker: Worker | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    def read(
        self,
        prompt: str,
        most: int,
        request_id: str,
        deadline: float,
        around: Dialogue = Dialogue(),  # noqa: B008 - frozen
        most_ahead: int = 0,
    ) -> "Future[PromptIds]":
        """Returns a future of a prompt's token ids, of which at most `most` are allowed. `deadline` is a moment of
        `time.monotonic`. `around`: other texts of the conversation. `most_ahead`: see `Tokenizer.prompt_ids`.

        The future raises InvalidOption, PromptTooLong, DeadlineExceeded, EngineFailed or NotReady. Raises NotReady
        after `close`.
        """
        if self._closed:
            raise NotReady("absent")
        texts = {"before": around.before, "after": around.after, "lead": around.lead}
        asked = {"prompt": prompt, **texts, "most": most, "most_ahead": most_ahead}
        return self._thread.submit(self._read, asked, request_id, deadline)

    def close(self) -> None:
        """Ends the process without waiting for its present prompt. The prompts that are read or wait get
        NotReady."""
        self._closed = True
        self._thread.shutdown(wait=False)
        if self._worker is not None:
            self._worker.stop()

    def _read(self, asked: dict[str, Any], request_id: str, deadline: float) -> PromptIds:
        if self._closed:
            raise NotReady("absent")
        if time.monotonic() >= deadline:
            raise DeadlineExceeded
        return _ids(self._ask(asked, request_id, deadline), asked["most"], request_id)

    def _ask(self, asked: dict[str, Any], request_id: str, deadline: float) -> dict[str, Any]:
        # Imported for the first prompt only.
        from snapcap.service.captioning.prompt_worker import RENEWED_CPU_SECONDS  # noqa: PLC0415
        from snapcap.service.images.processes import cpu_seconds  # noqa: PLC0415
        from snapcap.warmup.machine.worker import WorkerError, WorkerTimeoutError  # noqa: PLC0415

        worker = self._worker = self._worker or self._new_worker()
        if self._closed:  # `close` may have found no process to end
            worker.stop()
        try:
            worker.start(START_S)
        except WorkerError as error:
            raise (NotReady("absent") if self._closed else EngineFailed()) from error
        try:
            reply = worker.ask(asked, min(max(deadline - time.monotonic(), 0.1), MOST_S))
        except WorkerTimeoutError as error:
            raise DeadlineExceeded from error
        except WorkerError as error:
            if self._closed:
                raise NotReady("absent") from error
            _log(request_id, str(error))
            must = "take less time and memory to be tokenized; the process that tokenized it was ended"
            raise InvalidOption("prompt", must) from None
        used = None if worker.pid is None else cpu_seconds(worker.pid)
        if used is not None and used > RENEWED_CPU_SECONDS:
            worker.stop()
            self._worker = None
        return reply

    def _new_worker(self) -> "Worker":
        # Imported for the first prompt only.
        from snapcap.service.captioning.prompt_worker import PromptJob  # noqa: PLC0415
        from snapcap.warmup.machine.worker import Worker  # noqa: PLC0415  likewise

        job = PromptJob(self._folder.absolute(), "" if self._chat is None else to_json(self._chat))
        return Worker(_MODULE, job, {"TOKENIZERS_PARALLELISM": "false"}, trusted=False)


def _ids(reply: dict[str, Any], most: int, request_id: str) -> PromptIds:
    """Returns the ids of a reply after checking them: an exploit in the tokenizer may control the process.

    Raises:
        PromptTooLong: the prompt has more than `most` tokens.
        InvalidOption: the tokenizer refused the prompt.
        EngineFailed: the reply is none that the process should send.
    """
    match reply:
        case {"ids": [*ids], "ahead": int(ahead), "moved": int(moved)} if (
            0 <= ahead <= len(ids) <= most
            and 0 <= moved < _IDS
            and all(type(each) is int and 0 <= each < _IDS for each in ids)
        ):
            return PromptIds(tuple(ids), ahead, moved)
        case {"count": int(count)}:
            raise PromptTooLong(f"The prompt has {count} tokens; send at most {most} tokens.")
        case {"must": str(must), "cause": str(cause)}:
            if cause:
                _log(request_id, cause)
            raise InvalidOption("prompt", must[:200])
    raise EngineFailed


def _log(request_id: str, error: str) -> None:
    _logger.warning(
        "the tokenizer failed at a prompt", extra={"fields": {"request_id": request_id, "error": error}}
    )
